"""Parameters of `positions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import Diagnostic, DiagnosticWork


@dataclass(frozen=True, kw_only=True)
class ByPosition(Diagnostic):
    """Loss and errors by where in its window a token is: damage to long context shows there."""

    name: ClassVar[str] = "positions"
    reads_weights: ClassVar[bool] = False

    def work(self, schemes: Sequence[Scheme], blocks: int) -> DiagnosticWork:
        return DiagnosticWork("positions: from the sums of measurements; no stream of their own")
