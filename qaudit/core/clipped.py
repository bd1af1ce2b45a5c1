"""Symmetric grids that may end below the largest weight: it is cut, and the others are nearer.

    scale = share * max|w| / (2^(b-1) - 1), low = -2^(b-1), high = 2^(b-1) - 1

`fit_searched` tries 80 shares of the range of each row, from 1 down to 0.21, and takes the one that
leaves the least sum of |error|^2.4. That is `--w_clip` of the published code of QUIK and QuaRot;
the papers speak of the squared error. A scale is rounded to the dtype in which a file holds it
before its error is taken. A search ends early where what is cut alone costs every row more than its
best share: with smaller ones more is cut.

Shapes: N rows that have a scale each, K columns of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qaudit.core.grid import Grid, as_held

if TYPE_CHECKING:
    from torch import Tensor

SHARES = tuple(1 - k / 100 for k in range(80))
WHOLE = (1.0,)
NORM = 2.4
EVERY = 8  # shares after which what is cut is looked at
CHUNK = 2**16  # weights that are tried at a time, few enough to stay in a processor's cache


def fit_searched(
    weight: Tensor, bits: int, *, dim: int, scale_dtype: str, shares: Sequence[float] = SHARES
) -> Grid:
    """Lay a grid along one dimension over the best share of the range."""
    import torch

    rows = weight.movedim(dim, -1)
    flat_NK = rows.reshape(-1, rows.shape[-1])
    parts = flat_NK.split(max(1, CHUNK // flat_NK.shape[1]))
    scale_N = torch.cat([_best_scale(part, bits, scale_dtype, shares) for part in parts])
    scale = scale_N.reshape(*rows.shape[:-1], 1).movedim(-1, dim)
    low = torch.full_like(scale, -(2 ** (bits - 1)))
    return Grid(scale, low, low + 2**bits - 1)


def _best_scale(weight_NK: Tensor, bits: int, scale_dtype: str, shares: Sequence[float]) -> Tensor:
    import torch

    top = 2 ** (bits - 1) - 1
    largest_N1 = weight_NK.abs().amax(1, keepdim=True)
    unit_N1 = torch.where(largest_N1 == 0, 1.0, largest_N1)  # powers neither vanish nor overflow
    best_N1 = as_held(shares[0] * unit_N1 / top, scale_dtype)
    lowest_N1 = torch.full_like(unit_N1, float("inf"))
    for k, share in enumerate(shares if len(shares) > 1 else ()):
        scale_N1 = as_held(share * unit_N1 / top, scale_dtype)
        error_NK = torch.div(weight_NK, scale_N1).round_().clamp_(-top - 1, top).mul_(scale_N1)
        loss_N1 = _loss(error_NK.sub_(weight_NK).abs_(), unit_N1)
        better_N1 = loss_N1 < lowest_N1
        best_N1 = torch.where(better_N1, scale_N1, best_N1)
        lowest_N1 = torch.where(better_N1, loss_N1, lowest_N1)
        if k % EVERY == EVERY - 1:
            beyond_NK = weight_NK.abs().sub_((top + 1) * scale_N1).clamp_(min=0)
            if bool((_loss(beyond_NK, unit_N1) >= lowest_N1).all()):
                break
    return best_N1.squeeze(1)


def _loss(error_NK: Tensor, unit_N1: Tensor) -> Tensor:
    """Return the sums of powers of errors, for a part of the time of `pow`."""
    powers_NK = error_NK.div_(unit_N1).log2_().mul_(NORM).exp2_()
    return powers_NK.sum(1, keepdim=True)
