"""The column loop of GPTQ over one block as one Triton kernel.

A plan takes it on a GPU where it gives the plain loop's codes (`qaudit/core/column_loops.py`). It
was compared with the plain loop (`qaudit/core/gptq_block.py`) in Triton's interpreter and compiled
for CUDA; `make gpu` and `python -m benchmarks.kernel` time it.

The plain loop starts several small kernels per column, a thousand and more per block. Rows do
not depend on each other, so here a program owns a tile of rows, holds their targets for all
columns of the block in registers, and walks the columns alone:

    ratio = target_j / scale    code = round(clamp(ratio, low, high))    quantized = code * scale
    error = weight_j - quantized        target_k += error * U_jk for every later column k
                                        (and target_j * S_jk, where columns pull: gptaq)

What equality with the plain loop rests on:
- Division is IEEE (`div_rn`). Triton's own `/` on float32 is approximate; near a tie its last
  bit flips a code, and a flipped code moves every later column of the row.
- The product code * scale is rounded before it is subtracted, or the error would not be that
  of the weight that is stored: `enable_fp_fusion=False` keeps the compiler from contracting
  the two. Only the feedback is a fused multiply-add, and an explicit one: it is what matrix
  products do, and one rounding less.
- Rounding is half to even. Triton has no such function outside CUDA's own library, so 1.5 2^23
  is added and taken away: exact up to 2^22, and clamping first, which changes nothing as the
  limits are whole, brings every ratio far below. A code of -0 comes out as 0.
- Feedback is summed in the order of the columns. The result so depends on neither tile, number
  of warps nor device: a walk through the columns in numpy gives the same bits.

The plain loop sums feedback in another order, so that targets differ in the last bits and a
target at a tie may go the other way.

Given up: float64, and fusing the fit of the scales, which needs whole groups.

Shapes: B columns of the block, R rows, P grids, W the width of the tile (B rounded up to a
power of two), T rows of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from qaudit.support.lazy import Tensor, torch

if TYPE_CHECKING:
    import triton.language as tl

    from qaudit.core.gptq_block import Pull
    from qaudit.core.grid import Grid

EXACT = MappingProxyType({"enable_fp_fusion": False})  # how the kernel must be compiled


@dataclass(frozen=True)
class Tile:
    """How many rows one program owns, and how many warps share them."""

    rows: int = 16
    warps: int = 4


def obstacle(weight: Tensor) -> str | None:
    """Return why the kernel cannot take these weights, or `None` if it can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if not (weight.is_cuda or _is_interpreted()):
        return "there is no CUDA device"
    if str(weight.dtype) != "torch.float32":
        return f"it computes in float32, not {str(weight.dtype).removeprefix('torch.')}"
    return None


def quantize_block_fused(
    weight_BR: Tensor,
    target_BR: Tensor,
    lower_BB: Tensor,
    grid_PR: Grid,
    grid_of_B: Sequence[int],
    pull: Pull | None = None,
    tile: Tile = Tile(),
) -> None:
    """Do what `quantize_block` does, in one kernel: same arguments, in place as there."""
    size, rows = weight_BR.shape
    if not (weight_BR.is_contiguous() and target_BR.is_contiguous()):  # a solver's result
        copies = weight_BR.contiguous(), target_BR.contiguous()
        quantize_block_fused(*copies, lower_BB, grid_PR, grid_of_B, pull, tile)
        weight_BR.copy_(copies[0])
        target_BR.copy_(copies[1])
        return
    # What a column feeds to later ones is then one contiguous run.
    upper_BB = lower_BB.T.contiguous()
    pulled_BB = upper_BB if pull is None else pull.lower_BB.T.contiguous()
    grid_of = _uploaded(tuple(grid_of_B), weight_BR.device)
    programs = -(-rows // tile.rows)
    with torch.cuda.device_of(weight_BR):
        _kernel()[(programs,)](
            weight_BR,
            target_BR,
            upper_BB,
            pulled_BB,
            target_BR if pull is None else pull.target_BR,
            grid_PR.scale.contiguous(),
            grid_PR.low.contiguous(),
            grid_PR.high.contiguous(),
            grid_of,
            size,
            rows,
            WIDTH=1 << (size - 1).bit_length(),
            TILE=tile.rows,
            PULLS=pull is not None,
            num_warps=tile.warps,
            **EXACT,
        )


@lru_cache(maxsize=256)
def _uploaded(grid_of_B: tuple[int, ...], device: torch.device) -> Tensor:
    """Return which grid each column is rounded on: few kinds, and each copy waits."""
    return torch.tensor(grid_of_B, dtype=torch.int32, device=device)


def _is_interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def _kernel() -> Any:
    """Compile `_walk_columns` when it is first needed: importing Triton takes seconds."""
    # Triton, and its interpreter even more so, looks names up in the module of the function.
    global tl
    import triton
    import triton.language as tl

    return triton.jit(_walk_columns)


def _walk_columns(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - one pointer per array
    weight_ptr,
    target_ptr,
    upper_ptr,
    pulled_ptr,
    pulling_ptr,
    scale_ptr,
    low_ptr,
    high_ptr,
    grid_of_ptr,
    size,
    rows,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PULLS: tl.constexpr,
):
    """Round a tile of rows column by column: a Triton kernel, compiled by `_kernel`."""
    column_W = tl.arange(0, WIDTH)
    row_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real_T = row_T < rows
    target_WT = tl.load(
        target_ptr + column_W[:, None] * rows + row_T[None, :],
        mask=(column_W < size)[:, None] & real_T[None, :],
        other=0.0,
    )
    for j in range(size):
        here_T = j * rows + row_T
        grid_T = tl.load(grid_of_ptr + j) * rows + row_T
        scale_T = tl.load(scale_ptr + grid_T, mask=real_T, other=1.0)
        low_T = tl.load(low_ptr + grid_T, mask=real_T, other=0.0)
        high_T = tl.load(high_ptr + grid_T, mask=real_T, other=0.0)
        weight_T = tl.load(weight_ptr + here_T, mask=real_T, other=0.0)

        # Registers have no index: one column is the sum of itself and zeros.
        own_T = tl.sum(tl.where((column_W == j)[:, None], target_WT, 0.0), axis=0)
        ratio_T = tl.div_rn(own_T, scale_T)
        ratio_T = tl.clamp(ratio_T, low_T, high_T, propagate_nan=tl.PropagateNan.ALL)
        code_T = (ratio_T + 12582912.0) - 12582912.0
        quantized_T = code_T * scale_T
        error_T = weight_T - quantized_T
        tl.store(target_ptr + here_T, quantized_T, mask=real_T)
        tl.store(weight_ptr + here_T, error_T, mask=real_T)

        later_W = (column_W > j) & (column_W < size)
        feed_W = tl.load(upper_ptr + j * size + column_W, mask=later_W, other=0.0)
        target_WT = tl.fma(feed_W[:, None], error_T[None, :], target_WT)
        if PULLS:
            tl.store(pulling_ptr + here_T, own_T, mask=real_T)
            pull_W = tl.load(pulled_ptr + j * size + column_W, mask=later_W, other=0.0)
            target_WT = tl.fma(pull_W[:, None], own_T[None, :], target_WT)
