"""Parameters of `curvature`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import Diagnostic, DiagnosticWork

FORWARDS = 14
"""Forward passes that a product with the Hessian takes: blocks run again in both derivatives."""


@dataclass(frozen=True, kw_only=True)
class Curvature(Diagnostic):
    """Trace and largest eigenvalues of the Hessian of the loss, by role and layer too."""

    name: ClassVar[str] = "curvature"

    documents: int = 16
    probes: int = 30  # at most
    tolerance: float = 0.01  # standard error of the trace over the probes, as a part of it
    eigenvalues: int = 1  # 0: only the trace
    steps: int = 40  # of Lanczos, at most
    residual: float = 0.01  # of an eigenvalue, as a part of it
    seed: int = 0

    def __post_init__(self) -> None:
        self._must_be_at_least(documents=2, probes=2, eigenvalues=0, steps=2, seed=0)
        for field in ("tolerance", "residual"):
            if not 0 <= getattr(self, field) < 1:
                raise self._out_of_range(field, "use a number from 0 to 1")

    def work(self, schemes: Sequence[Scheme], blocks: int) -> DiagnosticWork:
        products = self.probes + (self.steps if self.eigenvalues else 0)
        return DiagnosticWork(
            f"curvature: at most {products} products with the Hessian on {self.documents} "
            f"documents, each of about {FORWARDS} forward passes; the model held whole in float32, "
            "and three vectors like it",
            passes=FORWARDS * products,
            documents=self.documents,
        )
