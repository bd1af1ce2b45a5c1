"""What of a vector is left beside others: Gram-Schmidt, twice, because once is not enough.

A single sweep leaves rounding errors along the others as large as what is taken away; a second
one removes them to working precision (Giraud, Langou and Rozloznik 2005). The vectors are
a list and may be on another device than the one that computes: they are as long as a model
has parameters, and there can be dozens of them.

Shapes: P entries of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1 << 20  # entries that are summed in double precision at once


def beside(vector_P: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return the vector without its components along orthonormal others."""
    left_P = vector_P.clone()
    for _ in range(2):
        for other_P in others:
            there_P = other_P.to(left_P.device)
            left_P.sub_(there_P, alpha=dot(there_P, left_P))
    return left_P


def dot(a_P: Tensor, b_P: Tensor) -> float:
    """Return the inner product, summed in blocks so that a long one loses no digits."""
    total = 0.0
    for a, b in zip(a_P.split(_BLOCK), b_P.split(_BLOCK), strict=True):
        total += float(a.double() @ b.double())
    return total


def norm(a_P: Tensor) -> float:
    """Return the length of a vector."""
    return float(dot(a_P, a_P) ** 0.5)


def signs(size: int, seed: int, like: Tensor) -> Tensor:
    """Draw a vector of signs, each entry 1 or -1: the same on every device."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn_P = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8)
    return drawn_P.to(like.device).to(like.dtype).mul_(2).sub_(1)
