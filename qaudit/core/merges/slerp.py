"""Spherical interpolation of two members, tensor by tensor (Shoemake 1985).

The mean of two directions is shorter than either; on the arc between them the length is kept.
sin((1 - t) * angle) / sin(angle) of the one and sin(t * angle) / sin(angle) of the other, the
angle being that of the two tensors as vectors. Where they point the same way, or exactly
opposite ways, there is no arc and the straight line is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.merge import Merge, inner
from qaudit.errors import UsageError
from qaudit.support.lazy import Tensor

NO_ARC = 1e-7  # below this sine the two quotients are noise


@dataclass(frozen=True, kw_only=True)
class Slerp(Merge):
    """Go from the first member towards the second on the arc between them."""

    t: float = 0.5

    name: ClassVar[str] = "slerp"
    most: ClassVar[int | None] = 2

    def __post_init__(self) -> None:
        if not 0 <= self.t <= 1:
            raise UsageError(f"`t` is {self.t:g}, not within 0 and 1", hint="write `slerp:t=0.5`")

    def shares(self, steps: Sequence[int | None]) -> tuple[float, ...]:
        return (1 - self.t, self.t)

    def coefficients(
        self, tensors: Sequence[Tensor], weights: Sequence[float]
    ) -> tuple[float, ...]:
        if len(tensors) > 2:
            raise UsageError(
                f"`slerp` goes from one member to another, and there are {len(tensors)}",
                hint="use `mean` for more than two",
            )
        t = weights[1] / sum(weights)
        first, second = tensors
        norms = math.sqrt(inner(first, first) * inner(second, second))
        cosine = max(-1.0, min(1.0, inner(first, second) / norms)) if norms > 0 else 1.0
        angle = math.acos(cosine)
        if math.sin(angle) < NO_ARC:
            return (1 - t, t)
        return (math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle))
