"""What came of the subjects of a round, and what an executor is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qaudit.errors import SourceError
from qaudit.saved.results import Filed, SearchResult
from qaudit.types import SILENT, Run, Watch, WorkUnit

RETRY_TASK = "run the same command again, or leave the task out of `--tasks`"


@dataclass(frozen=True, eq=False)
class UnitOutcome:
    """What came of a subject: results, or the error in place of them."""

    label: str
    results: tuple[Filed, ...] = ()  # draw by draw, with those that were measured otherwise
    search: SearchResult | None = None  # of a greedy soup
    failed: Mapping[str, SourceError] = field(default_factory=dict)  # by scheme
    error: SourceError | None = None

    @property
    def is_measured(self) -> bool:
        return self.error is None

    @property
    def plain(self) -> tuple[Filed, ...]:
        """The results that are measurements of the subject."""
        return tuple(result for result in self.results if not result.perturbed)


@dataclass(eq=False)
class Executor:
    """Has units measured. This one has nothing measured: parts run elsewhere, or did."""

    run: Run
    out: Path
    watch: Watch = SILENT

    def await_units(self, number: int, units: Sequence[WorkUnit]) -> None:
        """Return when the units of a round have records, or cannot have any now."""


def one_error(failed: Mapping[str, SourceError]) -> SourceError:
    """Make one error of the errors of all subjects; a single one is raised as it is."""
    first = next(iter(failed.values()))
    if len(failed) == 1:
        return first
    reasons = "; ".join(f"`{label}`: {error.message}" for label, error in failed.items())
    return SourceError(f"nothing could be measured: {reasons}", hint=first.hint)
