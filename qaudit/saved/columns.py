"""Arrays of a file, checked for kind, shape and bounds before statistics take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def column_in(
    arrays: Mapping[str, Array], name: str, kinds: str, count: int | None = None
) -> Array:
    """Return a column of the right kind and length; statistics take it as it is."""
    if name not in arrays:
        raise ValueError(f"it lacks `{name}`")
    column = arrays[name]
    if column.ndim != 1 or (column.size and column.dtype.kind not in kinds):
        raise ValueError(f"its `{name}` is no column of such values")
    if count is not None and len(column) != count:
        raise ValueError("it holds columns of different lengths")
    return column


def whole_numbers(arrays: Mapping[str, Array], name: str, count: int) -> Array:
    return _not_negative(column_in(arrays, name, "iu", count), name)


def text_in(arrays: Mapping[str, Array], name: str) -> str:
    text = arrays.get(name, np.array(""))
    if text.shape != () or text.dtype.kind != "U":
        raise ValueError(f"its `{name}` is no text")
    return str(text)


def are_there(arrays: Mapping[str, Array], names: tuple[str, ...]) -> bool:
    absent = [name for name in names if name not in arrays]
    if 0 < len(absent) < len(names):
        raise ValueError(f"it lacks `{absent[0]}`")
    return not absent


def numbers_in(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    """Return numbers of this shape; a loss may be infinite."""
    array = arrays[name]
    if array.shape != shape or (array.size and array.dtype.kind != "f"):
        raise ValueError(f"its `{name}` is no array of such values")
    return array


def amounts_in(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    array = numbers_in(arrays, name, shape)
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"its `{name}` is not finite, or below zero")
    return array


def counts_in(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    array = arrays[name]
    if array.shape != shape or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"its `{name}` is no array of counts")
    return _not_negative(array, name)


def _not_negative(array: Array, name: str) -> Array:
    if (array < 0).any():
        raise ValueError(f"its `{name}` are below zero")
    return array
