"""Quantities of whole models that other diagnostics measured, to set beside an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_TRAITS = (("weights", "kurtosis", "kurtosis"), ("curvature", "trace", "curvature"))
"""The table, its column, and the name of the quantity."""


def traits_of(tables: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the quantities: name -> subject -> value."""
    return dict(_traits(tables))


def _traits(tables: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    for table, column, name in _TRAITS:
        models = [row for row in tables.get(table, ()) if row["part"] == "model"]
        known = {row["subject"]: row[column] for row in models if row.get(column) is not None}
        if known:
            yield name, known
