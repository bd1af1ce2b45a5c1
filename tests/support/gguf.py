"""Weights and importance for GGUF blocks, the same numbers on every machine."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ROWS, COLUMNS = 24, 512

# sha256 of what ggml_quantize_chunk makes of `weight()`, without and with `importance()`;
# tests/peers/test_llamacpp.py computes them again.
HASHES = {
    ("Q8_0", False): "1ceb846a954beb29",
    ("Q8_0", True): "1ceb846a954beb29",
    ("Q4_0", False): "05e7a8e58306678d",
    ("Q4_0", True): "61c9bd7fb5a9e9f9",
    ("Q5_0", False): "17e33260302a99c1",
    ("Q5_0", True): "efbef70d5243856b",
    ("Q5_1", False): "280d817914b52453",
    ("Q5_1", True): "42677dc059823568",
    ("Q3_K", False): "ee6b04487dfc04ff",
    ("Q3_K", True): "c34a3152b0ae86a3",
    ("Q4_K", False): "a20a4a50a15585c1",
    ("Q4_K", True): "b8d4eb40246d729f",
    ("Q5_K", False): "5c239cf79d61bce6",
    ("Q5_K", True): "9194de67c805a41a",
    ("Q6_K", False): "9d93e5965bcc4628",
    ("Q6_K", True): "5f0c271c48c1b85b",
}


def _numbers(count: int, start: int) -> np.ndarray:
    """Return integers in +-2^15 of a congruential generator."""
    state, out = start, np.empty(count, np.int64)
    for k in range(count):
        state = (1664525 * state + 1013904223) % 2**32
        out[k] = (state >> 16) - 2**15
    return out


def weight() -> Tensor:
    """Return rows of many kinds: cubes of numbers, zeros, constants, large and small ones."""
    cubes = (_numbers(ROWS * COLUMNS, 1) ** 3).astype(np.float32) * np.float32(2.0**-49)
    values = cubes.reshape(ROWS, COLUMNS)
    values[1], values[2, :300], values[3, 1:] = 0, 0, 0
    values[4], values[5] = np.float32(0.01), np.float32(-0.02)
    values[6] *= np.float32(2.0**-20)
    values[7] *= np.float32(2.0**-60)
    values[8] *= np.float32(2.0**16)
    values[9], values[10] = abs(values[9]), -abs(values[10])
    values[11] = (_numbers(COLUMNS, 5) % 5 - 2).astype(np.float32)
    return torch.from_numpy(values)


def importance() -> Tensor:
    """Return mean squares of columns, some of them zero."""
    values = (_numbers(COLUMNS, 9) ** 2).astype(np.float32) * np.float32(2.0**-28)
    values[100:140] = 0
    return torch.from_numpy(values)
