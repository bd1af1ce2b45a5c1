"""The mean of the members' weights: the uniform soup of Wortsman et al. (2203.05482).

How the sum is formed, and why its bits are the same on every run, is in `core/merge.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.merge import Merge, WeightedSum


@dataclass(frozen=True, kw_only=True)
class Mean(Merge):
    """Average the members, all alike."""

    name: ClassVar[str] = "mean"

    def as_sum(self, weights: Sequence[float]) -> WeightedSum:
        if len(weights) == 1:
            return WeightedSum((1.0,))
        return WeightedSum(tuple(weights), sum(weights))
