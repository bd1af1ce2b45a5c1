"""Merges that measure the angle between members, tensor by tensor.

Spherical interpolation of two members, tensor by tensor (Shoemake 1985).

The mean of two directions is shorter than either; on the arc between them the length is kept.
sin((1 - t) * angle) / sin(angle) of the one and sin(t * angle) / sin(angle) of the other, the
angle being that of the two tensors as vectors. Where they point the same way, or exactly
opposite ways, there is no arc and the straight line is taken.

Model stock (Jang et al., 2403.19522): how far to go from an anchor to the members' mean.

The first member is the anchor, the checkpoint that the others were trained on from (the end of
stage 1, say). Fine-tuned weights form a thin shell around a centre; the angle between any two
of them, seen from the anchor, gives how far along the way to their mean the centre is:
t = N cos / (1 + (N - 1) cos), tensor by tensor. Members that agree are believed (t = 1), members
that went orthogonal ways are not (t = 0). The cosine is the mean over all pairs; one below zero
counts as zero, since it would be a step backwards from the anchor.
"""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True, kw_only=True)
class Stock(Merge):
    """Go from the first member, an anchor, towards the mean of the others as far as they agree."""

    name: ClassVar[str] = "stock"
    fewest: ClassVar[int] = 3

    def coefficients(
        self, tensors: Sequence[Tensor], weights: Sequence[float]
    ) -> tuple[float, ...]:
        """Return those of (1 - t) * anchor + t * mean of the others, whatever the weights."""
        if len(tensors) == 2:
            raise UsageError(
                "`stock` needs an anchor and two members or more", hint="or take their `mean`"
            )
        anchor, *members = tensors
        norms = [math.sqrt(inner(member, member, anchor)) for member in members]
        t = 1.0  # of a member that has not moved: nothing to measure an angle by
        if 0.0 not in norms:
            cosines = [
                inner(a, b, anchor) / (norm_a * norm_b)
                for (a, norm_a), (b, norm_b) in itertools.combinations(
                    zip(members, norms, strict=True), 2
                )
            ]
            cosine = min(1.0, max(0.0, math.fsum(cosines) / len(cosines)))
            t = len(members) * cosine / (1 + (len(members) - 1) * cosine)
        return (1 - t, *[t / len(members)] * len(members))
