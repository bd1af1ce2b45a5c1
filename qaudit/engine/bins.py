"""Sums over tokens by the document or sample that they are of, and by a bin."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def position_edges(context: int) -> Ints:
    """Return the bins of positions in a window: 16, and four times as many each further one."""
    edges = [0]
    while 16 * 4 ** (len(edges) - 1) < context:
        edges.append(16 * 4 ** (len(edges) - 1))
    return np.array([*edges, context], dtype=np.int64)


def sums_by_bin(
    unit_N: Ints, bin_N: Ints, shape: tuple[int, int], values_N: Floats | None = None
) -> Floats:
    """Return sums of N tokens by unit and bin, in this shape; without values how many they are."""
    flat = np.bincount(unit_N * shape[1] + bin_N, values_N, shape[0] * shape[1])
    return flat.astype(np.float64).reshape(shape)
