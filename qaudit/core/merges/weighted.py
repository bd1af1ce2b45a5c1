"""The weighted mean: `0.9*A+0.1*B`, as SmolLM3 was released.

Weights have to sum to one (a step beyond a checkpoint, `1.5*B-0.5*A`, does). Proportions are
written `weighted:scaled=true(3*A+1*B)` and divided by their sum; `weighted:free=true` takes any
weights as they are, nothing divided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.merges.mean import Mean
from qaudit.errors import UsageError

TOLERANCE = 1e-6  # thirds are written with a few digits


@dataclass(frozen=True, kw_only=True)
class Weighted(Mean):
    """Average the members, each with the weight it is given."""

    scaled: bool = False
    free: bool = False

    name: ClassVar[str] = "weighted"

    def __post_init__(self) -> None:
        if self.scaled and self.free:
            raise UsageError(
                "`weighted` cannot be both scaled and free",
                hint="scaled divides by the sum of the weights, free does not: take one",
            )

    def accept(self, weights: Sequence[float]) -> None:
        total = math.fsum(weights)
        if not all(math.isfinite(weight) for weight in weights) or total == 0:
            raise UsageError(
                f"weights that sum to {total:g} make no soup", hint="give finite weights"
            )
        if not (self.scaled or self.free) and abs(total - 1) > TOLERANCE:
            raise UsageError(
                f"the weights sum to {total:g}, not to 1",
                hint="write `weighted:scaled=true(...)` for proportions, "
                "or `weighted:free=true(...)` if that sum is meant",
            )

    def divisor(self, weights: Sequence[float]) -> float:
        return 1.0 if self.free else super().divisor(weights)
