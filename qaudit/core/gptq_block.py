"""The column loop of GPTQ over one block of columns: the part a fused kernel can replace.

With H = U D U^T (U unit upper triangular, D diagonal), the output error of a row is

    sum_j D_jj (e_j + sum_{i<j} e_i U_ij)^2        e = weight - quantized,

so column j is rounded towards `target_j = weight_j + sum_{i<j} e_i U_ij`: that is GPTQ, with
the feedback pulled when a column's turn comes instead of pushed to all columns behind it.

Weights are transposed (columns first): what is touched at each step is then one contiguous
run over the rows, on a CPU as on a GPU. Inside the block feedback is applied at once within a
leaf of 16 columns and by one matrix product to the columns behind the leaf.

What a kernel must keep: IEEE division by the scale, round half to even, the feedback subject
to the same order of columns. Rows are independent of each other, so a program may own a set
of rows and walk the columns alone.

Shapes: B columns of the block, R rows, P grids (sets of one scale per row) used in the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from qaudit.core.grid import Grid

BLOCK = 128
LEAF = 16


def quantize_block(
    weight_BR: Tensor,
    target_BR: Tensor,
    factor_BB: Tensor,
    grid_PR: Grid,
    grid_of_B: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the quantized weights of a block and their errors, both (B, R); eats `target_BR`.

    `target_BR` holds the weights plus the feedback of all earlier blocks, `factor_BB` the
    block's own unit upper triangle of U, and `grid_of_B` says for each column which row of
    `grid_PR` (scale, low and high, each (P, R)) it is rounded on.
    """
    import torch

    size = weight_BR.shape[0]
    quantized_BR, error_BR = torch.empty_like(weight_BR), torch.empty_like(weight_BR)
    quantized, errors = quantized_BR.unbind(), error_BR.unbind()
    weights, targets = weight_BR.unbind(), target_BR.unbind()
    grids = list(zip(grid_PR.scale, grid_PR.low, grid_PR.high, strict=True))
    for start in range(0, size, LEAF):
        stop = min(start + LEAF, size)
        for j in range(start, stop):
            scale_R, low_R, high_R = grids[grid_of_B[j]]
            q_R = torch.div(targets[j], scale_R, out=quantized[j]).round_()
            torch.clamp(q_R, low_R, high_R, out=q_R).mul_(scale_R)
            torch.sub(weights[j], q_R, out=errors[j])
            if j + 1 < stop:
                target_BR[j + 1 : stop].addr_(factor_BB[j, j + 1 : stop], errors[j])
        if stop < size:
            target_BR[stop:].addmm_(factor_BB[start:stop, stop:].T, error_BR[start:stop])
    return quantized_BR, error_BR
