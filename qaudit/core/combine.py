"""Sums of tensors with a coefficient each: what every merge comes down to.

Sums run in double precision and in the members' order, so that a soup of bf16 members does
not lose what averaging is for, and the same members give the same bits on every run. One
slice at a time is widened; a whole embedding matrix in double precision would be the largest
thing in memory. Inner products add up slices short enough that no library shares one between
threads, exactly (`math.fsum`): their bits do not depend on the number of threads either.

The three steps of a sum are apart (`begun`, `add`, `end`), for callers that have one member
after another and not all of them at once: the same steps in the same order give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qaudit.errors import SourceError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SLICE = 1 << 20
SERIAL = 1 << 15  # torch's own grain: a reduction over no more than this stays on one thread


def combine(
    tensors: Sequence[Tensor],
    coefficients: Sequence[float],
    divisor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return sum(coefficient * tensor) / divisor in `dtype`, or in that of the first tensor."""
    import torch

    first = tensors[0]
    merged = torch.empty(first.shape, dtype=dtype or first.dtype, device=first.device)
    slices = zip(*(t.reshape(-1).split(SLICE) for t in tensors), strict=True)
    for target, parts in zip(merged.view(-1).split(SLICE), slices, strict=True):
        wide = begun(parts[0], coefficients[0])
        for part, coefficient in zip(parts[1:], coefficients[1:], strict=True):
            add(wide, part, coefficient)
        end(wide, divisor, target)
    return merged


def begun(part: Tensor, coefficient: float) -> Tensor:
    """Return the sum of a slice of the first member, in double precision."""
    return part.double() * coefficient


def add(wide: Tensor, part: Tensor, coefficient: float) -> None:
    """Add the same slice of the next member to a sum."""
    wide.add_(part.double(), alpha=coefficient)


def end(wide: Tensor, divisor: float, target: Tensor) -> None:
    """Divide a sum, which is used up, and round it once into `target`."""
    target.copy_(wide.div_(divisor))


def inner(a: Tensor, b: Tensor, origin: Tensor | None = None) -> float:
    """Return the inner product of two tensors, or of what leads to them from `origin`."""
    parts = [t.reshape(-1).split(SERIAL) for t in ((a, b) if origin is None else (a, b, origin))]
    sums = []
    for slices in zip(*parts, strict=True):
        wide = [part.double() for part in slices]
        if origin is not None:
            wide = [wide[0] - wide[2], wide[1] - wide[2]]
        sums.append(float((wide[0] * wide[1]).sum()))
    return math.fsum(sums)


def must_fit(tensors: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Refuse members that cannot be merged."""
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


def only(
    tensors: Sequence[Tensor], weights: Sequence[float], dtype: torch.dtype | None
) -> Tensor | None:
    """Return a copy of the one member there is, or nothing where several are to be merged."""
    must_fit(tensors, weights)
    return tensors[0].to(dtype or tensors[0].dtype, copy=True) if len(tensors) == 1 else None
