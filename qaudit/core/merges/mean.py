"""The mean of the members' weights: the uniform soup of Wortsman et al. (2203.05482).

How the sum is formed, and why its bits are the same on every run, is in `core/combine.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qaudit.core.combine import combine, must_fit
from qaudit.core.merge import Merge

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Mean(Merge):
    """Average the members, all alike."""

    name: ClassVar[str] = "mean"

    def merge(
        self,
        tensors: Sequence[Tensor],
        weights: Sequence[float],
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return sum(weight * tensor) / sum(weight)."""
        must_fit(tensors, weights)
        if len(tensors) == 1:
            return tensors[0].to(dtype or tensors[0].dtype, copy=True)
        return combine(tensors, weights, sum(weights), dtype)
