"""The mean of the members' weights: the uniform soup of Wortsman et al. (2203.05482).

How the sum is formed, and why its bits are the same on every run, is in `core/merge.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.merge import Merge
from qaudit.support.lazy import Tensor


@dataclass(frozen=True, kw_only=True)
class Mean(Merge):
    """Average the members, all alike."""

    name: ClassVar[str] = "mean"

    def coefficients(
        self, tensors: Sequence[Tensor], weights: Sequence[float]
    ) -> tuple[float, ...]:
        return tuple(weights)

    def divisor(self, weights: Sequence[float]) -> float:
        return sum(weights)
