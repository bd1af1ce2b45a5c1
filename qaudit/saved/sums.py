"""Sums of fidelity and by position as arrays of a file of evidence; older files have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qaudit.core.histogram import BINS
from qaudit.types import Fidelity, Positions

Array = np.ndarray[Any, Any]
Tokens = npt.NDArray[np.int64]

_FIDELITY = ("kl_sum", "kl_max", "kl_counts", "same_top", "squared_dp_sum")
_POSITIONS = ("position_edges", "position_tokens", "position_nll_sum")
_MOST_POSITIONS = 64


def sums_of(fidelity: Fidelity | None, positions: Positions | None) -> dict[str, Array]:
    """Return the arrays that are there, by the names in the file."""
    arrays: dict[str, Array | None] = {}
    if fidelity is not None:
        arrays |= {name: getattr(fidelity, name) for name in _FIDELITY}
    if positions is not None:
        arrays |= {f"position_{name}": value for name, value in vars(positions).items()}
    return {name: value for name, value in arrays.items() if value is not None}


def fidelity_of(arrays: Mapping[str, Array], tokens: Tokens) -> Fidelity | None:
    """Read what a stream differs from full precision by; ValueError for what cannot be."""
    if not _are_there(arrays, _FIDELITY):
        return None
    shape = tokens.shape
    counts = _counts(arrays, "kl_counts", (*shape, BINS))
    same_top = _counts(arrays, "same_top", shape)
    if (counts.sum(axis=1, dtype=np.int64) != tokens).any():
        raise ValueError("its `kl_counts` are not of its tokens")
    if (same_top > tokens).any():
        raise ValueError("its `same_top` are more than its tokens")
    return Fidelity(
        kl_sum=_amounts(arrays, "kl_sum", shape),
        kl_max=_amounts(arrays, "kl_max", shape),
        kl_counts=counts,
        same_top=same_top,
        squared_dp_sum=_amounts(arrays, "squared_dp_sum", shape),
    )


def positions_of(
    arrays: Mapping[str, Array], tokens: Tokens, *, compared: bool
) -> Positions | None:
    """Read the sums by position in the window; ValueError for what cannot be."""
    if not _are_there(arrays, _POSITIONS):
        return None
    edges = arrays["position_edges"]
    if edges.ndim != 1 or edges.dtype.kind not in "iu" or not 2 <= len(edges) <= _MOST_POSITIONS:
        raise ValueError("its `position_edges` are no bins")
    if edges[0] != 0 or (np.diff(edges.astype(np.int64)) <= 0).any():
        raise ValueError("its `position_edges` do not rise from 0")
    shape = (*tokens.shape, len(edges) - 1)
    counts = _counts(arrays, "position_tokens", shape)
    if (counts.sum(axis=1, dtype=np.int64) != tokens).any():
        raise ValueError("its `position_tokens` are not those of its documents")
    return Positions(
        edges=edges.astype(np.int64),
        tokens=counts.astype(np.int64),
        nll_sum=_numbers(arrays, "position_nll_sum", shape),
        kl_sum=_amounts(arrays, "position_kl_sum", shape) if compared else None,
    )


def _are_there(arrays: Mapping[str, Array], names: tuple[str, ...]) -> bool:
    absent = [name for name in names if name not in arrays]
    if 0 < len(absent) < len(names):
        raise ValueError(f"it lacks `{absent[0]}`")
    return not absent


def _numbers(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    """Return numbers of this shape; a loss may be infinite."""
    array = arrays[name]
    if array.shape != shape or (array.size and array.dtype.kind != "f"):
        raise ValueError(f"its `{name}` is no array of such values")
    return array


def _amounts(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    array = _numbers(arrays, name, shape)
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"its `{name}` is not finite, or below zero")
    return array


def _counts(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    array = arrays[name]
    if array.shape != shape or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"its `{name}` is no array of counts")
    if (array < 0).any():
        raise ValueError(f"its `{name}` are below zero")
    return array
