"""How the columns of a block are rounded: by the plain loop, or on a GPU by one kernel.

The plain loop starts about six kernels for each column, 140,000 in a block of a 7B model, which
takes a GPU longer than the arithmetic. `fused=auto`, the default of GPTQ and what derives from it,
takes what the plan names, and the plan names what it proved where it was made: each width of the
model is walked once with random weights, and in every block of 128 columns each row's codes must be
those of the plain loop up to a weight at a tie, within rounding. What differs or does not
compile leaves the plain loop, and a note says so. No time is taken, so that the same
machine always gives the same plan. On a CPU it is always the plain loop.

Shapes: B columns of a block, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from qaudit.core.gptq_block import BLOCK, Pull, quantize_block
from qaudit.core.gptq_triton import obstacle, quantize_block_fused
from qaudit.core.grid import fit
from qaudit.support.lazy import torch

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
