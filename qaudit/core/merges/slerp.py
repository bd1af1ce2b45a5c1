"""Spherical interpolation of two members, tensor by tensor (Shoemake 1985).

The mean of two directions is shorter than either; on the arc between them the length is kept.
sin((1 - t) * angle) / sin(angle) of the one and sin(t * angle) / sin(angle) of the other, the
angle being that of the two tensors as vectors. Where they point the same way, or exactly
opposite ways, there is no arc and the straight line is taken, as everybody does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qaudit.core.merge import Merge, combine, inner, sole_member
from qaudit.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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

    def merge(
        self,
        tensors: Sequence[Tensor],
        weights: Sequence[float],
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the point on the arc at the second member's part of the weight."""
        if (alone := sole_member(tensors, weights, dtype)) is not None:
            return alone
        if len(tensors) > 2:
            raise UsageError(
                f"`slerp` goes from one member to another, and there are {len(tensors)}",
                hint="use `mean` for more than two",
            )
        t = weights[1] / sum(weights)
        return combine(tensors, _coefficients(tensors[0], tensors[1], t), dtype=dtype)


def _coefficients(a: Tensor, b: Tensor, t: float) -> tuple[float, float]:
    norms = math.sqrt(inner(a, a) * inner(b, b))
    cosine = max(-1.0, min(1.0, inner(a, b) / norms)) if norms > 0 else 1.0
    angle = math.acos(cosine)
    if math.sin(angle) < NO_ARC:
        return (1 - t, t)
    return (math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle))
