"""The two halves of GPTQ: one factorization of the Hessian, and the column loop over a block.

With H = U D U^T (U unit upper triangular, D diagonal), the output error of a row is

    sum_j D_jj (e_j + sum_{i<j} e_i U_ij)^2        e = weight - quantized,

so column j is rounded towards `target_j = weight_j + sum_{i<j} e_i U_ij`: that is GPTQ, with
the feedback pulled when a column's turn comes instead of pushed to all columns behind it.

Weights are transposed (columns first): what is touched at each step is then one contiguous
run over the rows, on a CPU as on a GPU. Within a leaf of 16 columns a column pulls what the
leaf's earlier columns feed it; columns behind the leaf get its feedback by one matrix product.

A kernel can replace the column loop (`qaudit/core/column_loops.py`). What it must
keep: IEEE division by the scale, round half to even, codes clamped before they are scaled. The
order in which feedback is summed is free. Rows do not depend on each other, so a program may own
a set of rows and walk the columns alone.

Shapes: B columns of the block, R rows, P grids (sets of one scale per row) used in the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qaudit.core.grid import ColumnGrid
from qaudit.support.lazy import Tensor, torch

BLOCK = 128
LEAF = 16


@dataclass(frozen=True, eq=False)
class Pull:
    """What columns of a block feed to later ones in it by their targets, beside their errors."""

    lower_BB: Tensor  # strictly lower triangular, row j as in `lower_BB` of the errors
    target_BR: Tensor  # filled with the targets, before they are rounded


def quantize_block(
    weight_BR: Tensor,
    target_BR: Tensor,
    lower_BB: Tensor,
    grid_PR: ColumnGrid,
    grid_of_B: Sequence[int],
    pull: Pull | None = None,
) -> None:
    """Turn `target_BR` into the quantized weights and `weight_BR` into their errors, in place.

    `target_BR` comes with the weights plus the feedback of all earlier blocks, `lower_BB` is
    the transpose of the block's own triangle of U (unit lower; row j holds what earlier
    columns feed to column j), and `grid_of_B` says for each column which row of `grid_PR`
    it is rounded on.
    """
    size = len(weight_BR)
    weights, targets, lowers = weight_BR.unbind(), target_BR.unbind(), lower_BB.unbind()
    roundings = grid_PR.roundings()
    error_RB = weight_BR.T
    for start in range(0, size, LEAF):
        stop = min(start + LEAF, size)
        for j in range(start, stop):
            target_R = targets[j]
            if j > start:
                target_R.addmv_(error_RB.narrow(1, start, j - start), lowers[j][start:j])
            if pull is not None:
                before_RB = pull.target_BR[start:j].T
                target_R.addmv_(before_RB, pull.lower_BB[j, start:j])
                pull.target_BR[j] = target_R
            roundings[grid_of_B[j]](target_R)
            weights[j].sub_(target_R)
        if stop < size:
            target_BR[stop:].addmm_(lower_BB[stop:, start:stop], weight_BR[start:stop])
            if pull is not None:
                pulled_BB = pull.lower_BB[stop:, start:stop]
                target_BR[stop:].addmm_(pulled_BB, pull.target_BR[start:stop])


def factor_backwards(matrix_CC: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the transpose of U and D, or None if the matrix is not positive definite.

    This is the Cholesky factorization of the matrix with rows and columns reversed, written
    without reversing. Blocks keep the work in matrix products: on one CPU core this takes two
    thirds of the time of `torch.linalg.cholesky`, which spends as long on clearing the other
    triangle of a large matrix as on factorizing it.

    With H = G^T G, G lower, going from the last block row k to the first:

        G_kk^T G_kk = S_kk        G_k,<k = G_kk^-T S_k,<k        S_<k,<k -= G_k,<k^T G_k,<k

    Only the lower triangle of `matrix_CC` is read, and overwritten with the result; what
    is above the diagonal afterwards has no meaning.
    """
    starts = range(0, len(matrix_CC), BLOCK)
    root_C = torch.empty_like(matrix_CC[0])
    on_host = matrix_CC.device.type == "cpu"
    failures: list[Tensor] = []
    for start in reversed(starts):
        block = slice(start, start + BLOCK)
        reversed_BB, failed = torch.linalg.cholesky_ex(matrix_CC[block, block].flip(0, 1))
        failures.append(failed)
        if on_host and failed:  # a GPU would wait to tell, so that it is asked once
            return None
        upper_BB = reversed_BB.flip(0, 1)
        panel_BA = matrix_CC[block, :start]
        if start:
            # The inverse of a small, damped block is harmless, and products are what is fast.
            identity_BB = torch.eye(len(upper_BB), dtype=upper_BB.dtype, device=upper_BB.device)
            inverse_BB = torch.linalg.solve_triangular(upper_BB, identity_BB, upper=True)
            panel_BA.copy_(inverse_BB @ panel_BA)
        for before in starts[: start // BLOCK]:
            rows, columns = slice(before, before + BLOCK), slice(0, before + BLOCK)
            matrix_CC[rows, columns].addmm_(panel_BA[:, rows].T, panel_BA[:, columns], alpha=-1)
        root_C[block] = upper_BB.diagonal()
        diagonal_B1 = upper_BB.diagonal()[:, None]
        panel_BA.div_(diagonal_B1)
        matrix_CC[block, block] = upper_BB.T / diagonal_B1
    if bool(torch.stack(failures).any()):
        return None
    return matrix_CC, root_C.square()
