"""The weighted mean of the members' weights: the model soup of Wortsman et al. (2203.05482).

Sums run in double precision and in the members' order, so that a soup of bf16 members does
not lose what averaging is for, and the same members give the same bits. One slice at a time
is widened; a whole embedding matrix in double precision would be the largest thing in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qaudit.core.merge import Merge
from qaudit.errors import SourceError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SLICE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Mean(Merge):
    """Average the members, each with its weight."""

    name: ClassVar[str] = "mean"

    def merge(
        self,
        tensors: Sequence[Tensor],
        weights: Sequence[float],
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return sum(weight * tensor) / sum(weight)."""
        import torch

        _check(tensors, weights)
        first, total = tensors[0], sum(weights)
        if len(tensors) == 1:
            return first.to(dtype or first.dtype, copy=True)
        merged = torch.empty(first.shape, dtype=dtype or first.dtype, device=first.device)
        slices = zip(*(t.reshape(-1).split(SLICE) for t in tensors), strict=True)
        for target, parts in zip(merged.view(-1).split(SLICE), slices, strict=True):
            wide = parts[0].double() * weights[0]
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                wide.add_(part.double(), alpha=weight)
            target.copy_(wide.div_(total))
        return merged


def _check(tensors: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Refuse members that cannot be averaged."""
    if not tensors or len(tensors) != len(weights):
        raise UsageError(
            f"{len(tensors)} members and {len(weights)} weights do not make a soup",
            hint="give every member one weight",
        )
    if sum(weights) == 0:
        raise UsageError("the weights of a soup sum to zero", hint="give positive weights")
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise SourceError(
            f"members of a soup differ in shape: {sorted(shapes)}",
            hint="average checkpoints of one architecture",
        )
