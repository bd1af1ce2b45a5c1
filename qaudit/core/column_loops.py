"""How the columns of a block are rounded: by the plain loop, or on a GPU by one kernel.

The plain loop starts about six kernels for each column, 140,000 in a block of a 7B model, which
takes a GPU longer than the arithmetic. `fused=auto`, the default of GPTQ and what derives from it,
takes what the plan names, and the plan names what it proved where it was made: each width of the
model is walked once with random weights, and in every block of 128 columns each row's codes must be
those of the plain loop up to a weight at a tie, within rounding. What differs or does not
compile leaves the plain loop, and a note says so. No time is taken, so that the same
machine always gives the same plan. On a CPU it is always the plain loop.

**The kernel** was compared with the plain loop (`qaudit/core/gptq_solver.py`) in Triton's
interpreter and compiled for CUDA; `make gpu` and `python -m benchmarks.kernel` time it.

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

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from qaudit.core.gptq_solver import BLOCK, Pull, quantize_block
from qaudit.core.grid import Grid, fit
from qaudit.support.lazy import Tensor, torch

if TYPE_CHECKING:
    import triton.language as tl

TILE = (16, 4)
"""How many rows one program owns, and how many warps share them."""
EXACT = MappingProxyType({"enable_fp_fusion": False})  # how the kernel must be compiled


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
    tile: tuple[int, int] = TILE,
) -> None:
    """Do what `quantize_block` does, in one kernel: same arguments, in place as there."""
    size, rows = weight_BR.shape
    tile_rows, warps = tile
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
    programs = -(-rows // tile_rows)
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
            TILE=tile_rows,
            PULLS=pull is not None,
            num_warps=warps,
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


PLAIN, FUSED = "plain", "fused"
LOOPS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {PLAIN: quantize_block, FUSED: quantize_block_fused}
)
_ROWS, _GROUP, _BITS = 250, 32, 4


def choose(widths: Iterable[int], device: torch.device) -> tuple[str, str]:
    """Return the loop for models of these widths on a GPU, and a note that says why."""
    why = obstacle(torch.empty(0, device=device))
    if why is None:
        try:
            why = _difference(LOOPS[FUSED], sorted(set(widths)), device)
        except Exception as error:  # noqa: BLE001 - compilers and drivers raise anything
            why = " ".join(str(error).split())[:200] or type(error).__name__
    if why is None:
        return FUSED, "GPTQ's columns are rounded by the fused kernel: the plain loop's codes"
    return PLAIN, f"GPTQ's columns are rounded by the plain loop: not by the fused kernel ({why})"


def _difference(
    round_block: Callable[..., None], widths: Sequence[int], device: torch.device
) -> str | None:
    """Return where a loop's codes are not those of the plain loop, or None."""
    for width in widths:
        for pulls in (False, True):
            start = max(0, width - BLOCK) // BLOCK * BLOCK if pulls else 0
            for first in range(start, width, BLOCK):
                size = min(BLOCK, width - first)
                if not _agree(round_block, size, pulls=pulls, seed=first, device=device):
                    return f"other codes in columns {first} to {first + size} of {width}"
    return None


def _agree(
    round_block: Callable[..., None], size: int, *, pulls: bool, seed: int, device: torch.device
) -> bool:
    """Return whether both loops round a random block to the same codes, but for ties."""
    random = torch.Generator().manual_seed(seed)
    weight_BR, target_BR = (torch.randn(size, _ROWS, generator=random) for _ in range(2))
    target_BR = weight_BR + target_BR / 8  # feedback of earlier blocks
    lower_BB, pulled_BB = (
        torch.randn(size, size, generator=random).tril(-1) / size**0.5 for _ in range(2)
    )
    lower_BB += torch.eye(size)
    weight_BR, target_BR, lower_BB, pulled_BB = (
        tensor.to(device) for tensor in (weight_BR, target_BR, lower_BB, pulled_BB)
    )
    starts = range(0, size, _GROUP)
    grids = [fit(target_BR[a : a + _GROUP], _BITS, symmetric=True, dim=0) for a in starts]
    grid_PR = grids[0].joined(grids)
    grid_of_B = [column // _GROUP for column in range(size)]
    rounded = []
    for loop in (quantize_block, round_block):
        pull = Pull(pulled_BB / 8, torch.zeros_like(target_BR)) if pulls else None
        error_BR, quantized_BR = weight_BR.clone(), target_BR.clone()
        loop(error_BR, quantized_BR, lower_BB, grid_PR, grid_of_B, *([pull] if pull else []))
        fed_BR = error_BR if pull is None else pull.target_BR
        rounded.append((quantized_BR, error_BR, fed_BR))
    scale_BR = grid_PR.scale[grid_of_B]
    (plain_BR, error_BR, fed_BR), (other_BR, _, _) = rounded
    differ_BR = (plain_BR / scale_BR).round() != (other_BR / scale_BR).round()
    first_BR = differ_BR & (differ_BR.cumsum(0) == 1)
    # How far targets are from a tie, and how far rounding can move them, in steps. A sum of n terms
    # in float32, in any order, errs by at most n roundings of the sum of their sizes; the division
    # adds one of the quotient.
    whole_BR, sizes_BR = target_BR.double(), target_BR.double().abs()
    for feed_BB, source_BR in [(lower_BB.tril(-1), error_BR), (pulled_BB / 8, fed_BR)][: 1 + pulls]:
        whole_BR = whole_BR + feed_BB.double() @ source_BR.double()
        sizes_BR = sizes_BR + feed_BB.double().abs() @ source_BR.double().abs()
    steps_BR = whole_BR / scale_BR
    terms_B1 = 2 * torch.arange(2, size + 2, device=device)[:, None]
    reach_BR = torch.finfo(torch.float32).eps * terms_B1 * sizes_BR / scale_BR
    from_tie_BR = (steps_BR - steps_BR.floor() - 0.5).abs()
    return not bool((first_BR & ~(from_tie_BR <= reach_BR)).any())
