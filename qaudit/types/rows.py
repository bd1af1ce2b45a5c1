"""Rows of tables: what is written flat, because a table has columns and no objects.

An interval of a row is three columns: the field `ce` becomes `ce`, `ce_low` and `ce_high`, and the
field `interval` becomes `estimate`, `low` and `high`. The same names are in JSON, where pydantic
writes, reads and describes rows by the two hooks below, and in data frames. JSON has no infinity:
a bound that is not finite is null there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, get_type_hints


class _Columns(NamedTuple):
    """The columns of an interval, and whether all may be null because there is none."""

    names: tuple[str, str, str]
    optional: bool


class Row:
    """A dataclass whose intervals are three columns each."""

    nulls: ClassVar[Mapping[str, float]] = {}
    """What null stands for in fields that always hold a number."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Fold columns before a row is validated, and spread intervals when it is written."""
        from pydantic_core import core_schema

        row = handler(source)
        return core_schema.no_info_before_validator_function(
            partial(_fold, cls),
            {name: part for name, part in row.items() if name != "ref"},
            ref=row["ref"],  # or the second use of a row in a document would leave the hook out
            serialization=core_schema.wrap_serializer_function_ser_schema(
                lambda row, write: _spread(cls, write(row))
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        reference = handler(schema)
        row = handler.resolve_ref_schema(reference)
        described, required = row["properties"], row.get("required", [])
        for name, (columns, _) in _columns_of(cls).items():
            described |= {column: {"type": ["number", "null"]} for column in columns}
            required += [c for c in columns if name in required and c not in required]
            if name not in columns:
                del described[name]
                required = [column for column in required if column != name]
        described |= {column: {"type": ["number", "null"]} for column in cls.nulls}
        row["required"] = [name for name in described if name in required]
        return reference


@dataclass(frozen=True)
class Interval(Row):
    """An estimate and the interval around it."""

    nulls: ClassVar[Mapping[str, float]] = {
        "estimate": math.inf,
        "low": -math.inf,
        "high": math.inf,
    }

    estimate: float
    low: float
    high: float


_COLUMNS: dict[type, dict[str, _Columns]] = {}
"""The columns of each interval, by the type of the row."""


def _columns_of(kind: type[Row]) -> dict[str, _Columns]:
    if kind not in _COLUMNS:
        plain = {"interval": ("estimate", "low", "high")}
        _COLUMNS[kind] = {
            name: _Columns(
                plain.get(name, (name, f"{name}_low", f"{name}_high")), hint is not Interval
            )
            for name, hint in get_type_hints(kind).items()
            if hint is Interval or hint == Interval | None
        }
    return _COLUMNS[kind]


def _spread(kind: type[Row], row: dict[str, Any]) -> dict[str, Any]:
    intervals, spread = _columns_of(kind), dict[str, Any]()
    for name, value in row.items():
        if name in intervals:
            spread |= zip(
                intervals[name].names, value.values() if value else (None,) * 3, strict=True
            )
        else:
            spread[name] = value
    return spread


def _fold(kind: type[Row], row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    # Behind a function pydantic takes no list for a tuple.
    row = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
    for name, (columns, optional) in _columns_of(kind).items():
        if columns[0] in row:
            pairs = zip(Interval.nulls, columns, strict=True)
            bounds = {bound: row.pop(column) for bound, column in pairs if column in row}
            absent = bounds["estimate"] is None and optional
            row[name] = None if absent else bounds
    return {name: kind.nulls.get(name) if v is None else v for name, v in row.items()}
