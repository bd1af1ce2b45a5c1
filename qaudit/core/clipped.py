"""Symmetric grids that may end below the largest weight: it is cut, and the others are nearer.

    scale = share * max|w| / (2^(b-1) - 1), low = -2^(b-1), high = 2^(b-1) - 1

`fit_searched` tries 80 shares of the range of each row, from 1 down to 0.21, and takes the one that
leaves the least sum of |error|^2.4. That is `--w_clip` of the published code of QUIK and QuaRot;
the papers speak of the squared error. A scale is rounded to the dtype in which a file holds it
before its error is taken. Powers of 2.4 take most of the time, and squares tell most of them:

    sum |error|^2.4 >= K (sum error^2 / K)^1.2

so that only shares whose bound is not above the loss of the one with the least squares are tried.

Shapes: S shares, N rows that have a scale each, P pairs of both, K columns of one group.
"""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.core.grid import Grid, as_held
from qaudit.support.lazy import Tensor, torch

SHARES = tuple(1 - k / 100 for k in range(80))
WHOLE = (1.0,)
NORM = 2.4
SLACK = 1e-3  # of a bound, whose sums are rounded
CHUNK = 2**18  # weights that are tried at a time, few enough to stay in a cache
GPU_CHUNK = 2**26  # enough that starting kernels costs less than they do


def fit_searched(
    weight: Tensor, bits: int, *, dim: int, scale_dtype: str, shares: Sequence[float] = SHARES
) -> Grid:
    rows = weight.movedim(dim, -1)
    flat_NK = rows.reshape(-1, rows.shape[-1])
    parts = flat_NK.split(_chunk_rows(flat_NK))
    scale_N = torch.cat([_best_scale(part, bits, scale_dtype, shares) for part in parts])
    scale = scale_N.reshape(*rows.shape[:-1], 1).movedim(-1, dim)
    low = torch.full_like(scale, -(2 ** (bits - 1)))
    return Grid(scale, low, low + 2**bits - 1)


def _best_scale(weight_NK: Tensor, bits: int, scale_dtype: str, shares: Sequence[float]) -> Tensor:
    top, columns = 2 ** (bits - 1) - 1, weight_NK.shape[1]
    largest_N1 = weight_NK.abs().amax(1, keepdim=True)
    unit_N1 = torch.where(largest_N1 == 0, 1.0, largest_N1)  # powers neither vanish nor overflow
    scale_SN1 = torch.stack([share * unit_N1 for share in shares]).div_(top)
    scale_SN1 = as_held(scale_SN1, scale_dtype)
    if len(shares) == 1:
        return scale_SN1[0, :, 0]

    def loss(rows_N: Tensor, scale_N1: Tensor) -> Tensor:
        weight, unit_N = weight_NK[rows_N], unit_N1[rows_N]
        error = torch.div(weight, scale_N1).round_().clamp_(-top - 1, top).mul_(scale_N1)
        return error.sub_(weight).abs_().div_(unit_N).log2_().mul_(NORM).exp2_().sum(1)

    squares_SN = torch.stack([_squares(weight_NK, scale_N1, top) for scale_N1 in scale_SN1])
    squares_SN *= (scale_SN1 / unit_N1).squeeze(2) ** 2
    bound_SN = (1 - SLACK) * columns * (squares_SN / columns) ** (NORM / 2)
    every_N, nearest_N = torch.arange(len(unit_N1), device=unit_N1.device), squares_SN.argmin(0)
    tried_SN = bound_SN <= loss(every_N, scale_SN1[nearest_N, every_N])
    loss_SN = torch.full_like(bound_SN, float("inf"))
    # All pairs at once: a GPU waits wherever the host must be told how many there are.
    for tried_P2 in tried_SN.nonzero().split(_chunk_rows(weight_NK)):
        shares_P, rows_P = tried_P2.unbind(1)
        loss_SN[shares_P, rows_P] = loss(rows_P, scale_SN1[shares_P, rows_P])
    return scale_SN1[loss_SN.argmin(0), every_N, 0]


def _chunk_rows(weight_NK: Tensor) -> int:
    on_host = weight_NK.device.type == "cpu"
    return max(1, (CHUNK if on_host else GPU_CHUNK) // weight_NK.shape[1])


def _squares(weight_NK: Tensor, scale_N1: Tensor, top: int) -> Tensor:
    steps_NK = torch.div(weight_NK, scale_N1)
    steps_NK.sub_(steps_NK.round().clamp_(-top - 1, top))
    squares_N: Tensor = torch.linalg.vecdot(steps_NK, steps_NK)
    return squares_N
