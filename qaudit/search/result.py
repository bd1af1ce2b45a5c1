"""What a search for a soup gave. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from qaudit.saved.results import Filed
from qaudit.types import Finding, GreedySearch, Subject


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The soup that a search ended with and its results; None where one checkpoint is best."""

    subject: Subject | None
    results: tuple[Filed, ...]
    row: GreedySearch
    findings: tuple[Finding, ...] = ()
