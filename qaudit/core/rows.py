"""Rows of logits, a few at a time, so that they stay in a core's cache between operations.

e^x is 2^(x log2 e), which CPUs without Intel's libraries compute five times as fast: for a term
e^x of a sum that is an error of |x| 6e-8, little where the term is large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from qaudit.support.lazy import Tensor, torch

LOG2_E = math.log2(math.e)
CORE_ELEMENTS = 2**18  # a megabyte in float32
CUDA_ELEMENTS = 2**24

# Logits of a chunk stay under 32 MiB on the CPU: up to there glibc hands the same memory out again,
# above it every chunk is mapped afresh and its page faults cost more than the sums.
_HEAD_ELEMENTS, _HEAD_ROWS = 2**23 - 2**16, 256
_CUDA_HEAD_ELEMENTS, _CUDA_HEAD_ROWS = 2**26, 4096


def head_rows(vocabulary: int, device: str) -> int:
    """Return how many rows of logits a kind of device has in memory at once."""
    on_cpu = device == "cpu"
    elements = _HEAD_ELEMENTS if on_cpu else _CUDA_HEAD_ELEMENTS
    return min(max(elements // max(vocabulary, 1), 16), _HEAD_ROWS if on_cpu else _CUDA_HEAD_ROWS)


def row_parts(logits_NV: Tensor, rows: int | None = None) -> Iterator[slice]:
    """Yield slices of all rows, or of so many of them.

    Of at least two: of a single one, threads would split the sum.
    """
    rows = len(logits_NV) if rows is None else rows
    per_core = CORE_ELEMENTS * torch.get_num_threads()
    elements = CUDA_ELEMENTS if logits_NV.device.type == "cuda" else per_core
    count = max(1, rows // max(2, elements // logits_NV.shape[1]))
    for k in range(count):
        yield slice(rows * k // count, rows * (k + 1) // count)
