"""Loss and errors by where in its window a token is; bins of a cell hold at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import Diagnostic, DiagnosticWork
from qaudit.diagnostics.strata import columns_of
from qaudit.judge.table import Measurements
from qaudit.types import Diagnostics, Finding, PositionRow


@dataclass(frozen=True, kw_only=True)
class ByPosition(Diagnostic):
    """Loss and errors by where in its window a token is: damage to long context shows there."""

    name: ClassVar[str] = "positions"
    reads_weights: ClassVar[bool] = False

    def work(self, schemes: Sequence[Scheme], blocks: int) -> DiagnosticWork:
        return DiagnosticWork("positions: from the sums of measurements; no stream of their own")


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    rows = tuple(PositionRow(**columns) for columns in columns_of(table, "positions"))
    return replace(diagnostics, positions=rows), ()
