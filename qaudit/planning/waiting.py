"""How much a block holds while calibration waits inside it. No torch: a plan asks it too."""

from __future__ import annotations


def waiting_nbytes(tokens: int, hidden: int, widest: int, itemsize: int) -> int:
    """Estimate what a block holds while so many tokens wait inside it.

    The residual, and the operands of attention or the inner product of the mlp.
    """
    return tokens * (5 * hidden + widest) * itemsize
