"""Parameters of `weights`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import Diagnostic, DiagnosticWork


@dataclass(frozen=True, kw_only=True)
class WeightStatistics(Diagnostic):
    """Kurtosis, outliers, ranges and distance to the grid, by tensor, role and model."""

    name: ClassVar[str] = "weights"
    reads_previous: ClassVar[bool] = True

    group: int = 128
    sym: bool = True  # as the schemes here have it
    outlier: float = 6.0  # standard deviations

    def schemes(self, schemes: Sequence[Scheme]) -> Sequence[Scheme]:
        """Return all schemes: the perturbation of each is measured."""
        return schemes

    def work(self, schemes: Sequence[Scheme], blocks: int) -> DiagnosticWork:
        text = "weights: read while schemes quantize them; no stream of their own"
        return DiagnosticWork(text, watches=True)
