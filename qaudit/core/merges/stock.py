"""Model stock (Jang et al., 2403.19522): how far to go from an anchor to the members' mean.

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
        t = _way(anchor, members)
        return (1 - t, *[t / len(members)] * len(members))


def _way(anchor: Tensor, others: Sequence[Tensor]) -> float:
    norms = [math.sqrt(inner(member, member, anchor)) for member in others]
    if 0.0 in norms:  # a member that has not moved: nothing to measure an angle by
        return 1.0
    cosines = [
        inner(a, b, anchor) / (norm_a * norm_b)
        for (a, norm_a), (b, norm_b) in itertools.combinations(zip(others, norms, strict=True), 2)
    ]
    cosine = min(1.0, max(0.0, math.fsum(cosines) / len(cosines)))
    count = len(others)
    return count * cosine / (1 + (count - 1) * cosine)
