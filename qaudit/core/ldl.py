"""One triangular factorization from the last column backwards: H = U D U^T, U unit upper.

This is what GPTQ needs of a Hessian (`qaudit/core/gptq_block.py`): row by row, the transpose
of U says what the errors of earlier columns feed to each column. It is the Cholesky
factorization of the matrix with rows and columns reversed, written without reversing. Blocks
keep the work in matrix products: on one CPU core this takes two thirds of the time of
`torch.linalg.cholesky`, which spends as long on clearing the other triangle of a large matrix
as on factorizing it.

With H = G^T G, G lower, going from the last block row k to the first:

    G_kk^T G_kk = S_kk        G_k,<k = G_kk^-T S_k,<k        S_<k,<k -= G_k,<k^T G_k,<k
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128


def factor_backwards(matrix_CC: Tensor) -> Tensor | None:
    """Return the transpose of U, or None if the matrix is not positive definite.

    Only the lower triangle of `matrix_CC` is read, and overwritten with the result; what
    is above the diagonal afterwards has no meaning.
    """
    import torch

    starts = range(0, len(matrix_CC), BLOCK)
    for start in reversed(starts):
        own = slice(start, start + BLOCK)
        reversed_BB, failed = torch.linalg.cholesky_ex(matrix_CC[own, own].flip(0, 1))
        if failed:
            return None
        upper_BB = reversed_BB.flip(0, 1)
        panel_BA = matrix_CC[own, :start]
        if start:
            # The inverse of a small, damped block is harmless, and products are what is fast.
            identity_BB = torch.eye(len(upper_BB), dtype=upper_BB.dtype, device=upper_BB.device)
            inverse_BB = torch.linalg.solve_triangular(upper_BB, identity_BB, upper=True)
            panel_BA.copy_(inverse_BB @ panel_BA)
        for before in starts[: start // BLOCK]:
            rows, columns = slice(before, before + BLOCK), slice(0, before + BLOCK)
            matrix_CC[rows, columns].addmm_(panel_BA[:, rows].T, panel_BA[:, columns], alpha=-1)
        diagonal_B1 = upper_BB.diagonal()[:, None]
        panel_BA.div_(diagonal_B1)
        matrix_CC[own, own] = upper_BB.T / diagonal_B1
    return matrix_CC
