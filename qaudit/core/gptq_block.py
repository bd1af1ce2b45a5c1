"""The column loop of GPTQ over one block of columns: the part a fused kernel can replace.

With H = U D U^T (U unit upper triangular, D diagonal), the output error of a row is

    sum_j D_jj (e_j + sum_{i<j} e_i U_ij)^2        e = weight - quantized,

so column j is rounded towards `target_j = weight_j + sum_{i<j} e_i U_ij`: that is GPTQ, with
the feedback pulled when a column's turn comes instead of pushed to all columns behind it.

Weights are transposed (columns first): what is touched at each step is then one contiguous
run over the rows, on a CPU as on a GPU. Within a leaf of 16 columns a column pulls what the
leaf's earlier columns feed it; columns behind the leaf get its feedback by one matrix product.

What a kernel must keep: IEEE division by the scale, round half to even, codes clamped before
they are scaled. The order in which feedback is summed is free. Rows do not depend on each
other, so a program may own a set of rows and walk the columns alone.

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
    lower_BB: Tensor,
    grid_PR: Grid,
    grid_of_B: Sequence[int],
) -> None:
    """Turn `target_BR` into the quantized weights and `weight_BR` into their errors, in place.

    `target_BR` comes with the weights plus the feedback of all earlier blocks, `lower_BB` is
    the transpose of the block's own triangle of U (unit lower; row j holds what earlier
    columns feed to column j), and `grid_of_B` says for each column which row of `grid_PR`
    (scale, low and high, each (P, R)) it is rounded on.
    """
    import torch

    size = len(weight_BR)
    weights, targets, lowers = weight_BR.unbind(), target_BR.unbind(), lower_BB.unbind()
    grids = list(
        zip(grid_PR.scale.unbind(), grid_PR.low.unbind(), grid_PR.high.unbind(), strict=True)
    )
    error_RB = weight_BR.T
    for start in range(0, size, LEAF):
        stop = min(start + LEAF, size)
        for j in range(start, stop):
            target_R = targets[j]
            if j > start:
                target_R.addmv_(error_RB.narrow(1, start, j - start), lowers[j][start:j])
            scale_R, low_R, high_R = grids[grid_of_B[j]]
            target_R.div_(scale_R).round_()
            torch.clamp(target_R, low_R, high_R, out=target_R).mul_(scale_R)
            weights[j].sub_(target_R)
        if stop < size:
            target_BR[stop:].addmm_(lower_BB[stop:, start:stop], weight_BR[start:stop])
