"""A rotation in front of a linear, x R (W R)^T, which changes nothing but what is rounded.

R is orthogonal and symmetric, and closed-form for every n = 2^k m with m odd: a Walsh-Hadamard
matrix of 2^k beside a Hartley matrix of m, cas(2 pi i j / m) / sqrt(m). Its entries are at most
sqrt(2 / n) in magnitude, so that no column of what is rotated stands out. QuaRot's tables of
Hadamard matrices of 12, 20, ... 172 are not needed.

Every linear is rotated alone, which is exact for every architecture: nothing has to be folded into
what precedes. Rotations that are folded into embeddings (R1 of SpinQuant) are free at run time, but
need pre-norm models and an embedding that is not the head.

Shapes: R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from qaudit.core.scheme import Linears

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def rotation(n: int) -> Tensor:
    """Return the orthogonal matrix of size n, in float64."""
    import torch

    power = n & -n  # the largest power of two that divides n
    odd = n // power
    walsh = torch.ones(1, 1, dtype=torch.float64)
    while len(walsh) < power:
        walsh = torch.cat([torch.cat([walsh, walsh], 1), torch.cat([walsh, -walsh], 1)])
    k = torch.arange(odd, dtype=torch.float64)
    angle = 2 * math.pi * (torch.outer(k, k) % odd) / odd
    return torch.kron(walsh / math.sqrt(power), (angle.cos() + angle.sin()) / math.sqrt(odd))


def rotate(x: Tensor) -> Tensor:
    """Return x @ rotation(n), computed in at least float32 as two small products.

    A rotation of a * b is that of a beside that of b: a + b multiplications a column, not a * b.
    """
    import torch

    n = x.shape[-1]
    a = 1 << ((n & -n).bit_length() - 1) // 2  # a power of two near the root of the largest
    wide = torch.promote_types(x.dtype, torch.float32)
    left, right = _factors(a, n // a, wide, x.device)
    turned = left @ (x.to(wide).reshape(-1, a, n // a) @ right)
    return turned.reshape(x.shape).to(x.dtype)


@lru_cache(maxsize=16)
def _factors(a: int, b: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return rotation(a).to(device, dtype), rotation(b).to(device, dtype)


def rotated(linears: Linears) -> Linears:
    """Return linears and the second moments of their inputs behind the rotation."""
    weights = {name: _wide(rotate, one.detach()) for name, one in linears.weights.items()}
    inputs = linears.inputs
    if inputs is not None:
        # What is no sum of squares is not known behind the rotation.
        gram_CC = rotate(rotate(inputs.gram_CC).T.contiguous()).contiguous()
        inputs = replace(inputs, gram_CC=(gram_CC + gram_CC.T) / 2, absmax_C=None)
    return replace(linears, weights=weights, inputs=inputs, fold_C=None, fold_is_norm=False)


def _wide(change: Callable[[Tensor], Tensor], weight_RC: Tensor) -> Tensor:
    """Change a weight without rounding the result to its dtype."""
    import torch

    return change(weight_RC.to(torch.promote_types(weight_RC.dtype, torch.float32)))
