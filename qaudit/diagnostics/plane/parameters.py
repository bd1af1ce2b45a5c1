"""Parameters of `plane`: the points of a slice through a checkpoint.

A point is theta + a * v + b * u: v leads from the checkpoint to the one before it, u to what a
scheme makes of it, so that (0, 0), (1, 0) and (0, 1) are the three models themselves. Neither
direction is scaled: a slice shows what these moves cost, not how wide a valley is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import Diagnostic, DiagnosticWork
from qaudit.errors import UsageError
from qaudit.settings import EXAMPLE_SCHEME


@dataclass(frozen=True, kw_only=True)
class Plane(Diagnostic):
    """The loss from a checkpoint to its quantized self and beyond, and to the one before it."""

    name: ClassVar[str] = "plane"
    reads_previous: ClassVar[bool] = True

    grid: bool = False  # towards the checkpoint before, too
    steps: int = 4  # from one of the models to the next
    beyond: int = 2  # steps on either side of them
    documents: int = 64
    scheme: str = "auto"  # the first of the recipe with 3 bits, or else the first

    def __post_init__(self) -> None:
        self._must_be_at_least(steps=1, beyond=0, documents=2)

    @property
    def along(self) -> tuple[float, ...]:
        """Return the places of points along a direction; 0 and 1 are among them."""
        return tuple(k / self.steps for k in range(-self.beyond, self.steps + self.beyond + 1))

    def schemes(self, schemes: Sequence[Scheme]) -> Sequence[Scheme]:
        return [self.scheme_among(schemes)]

    def work(self, schemes: Sequence[Scheme], blocks: int) -> DiagnosticWork:
        scheme, along = self.scheme_among(schemes), len(self.along)
        across = f"{along} passes of them, towards the checkpoint before"
        return DiagnosticWork(
            f"plane at {scheme.short}: {along} streams more for each subject, in float32; "
            + (across if self.grid else "one pass"),
            streams=along,
            passes=along if self.grid else 1,
            documents=self.documents,
            schemes=(scheme,),
        )

    def scheme_among(self, schemes: Sequence[Scheme]) -> Scheme:
        """Return the scheme whose weights the slice leads to."""
        if self.scheme != "auto":
            return parse_scheme(self.scheme)
        three = (scheme for scheme in schemes if getattr(scheme, "bits", None) == 3)
        first = next(three, next(iter(schemes), None))
        if first is None:
            raise UsageError(
                "a slice leads to what a scheme makes of a model, and this audit has none",
                hint=f"name one, as `--diagnose plane:scheme={EXAMPLE_SCHEME}`",
            )
        return first
