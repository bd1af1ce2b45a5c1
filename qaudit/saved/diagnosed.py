"""What diagnostics found, read back from the rows of an audit.

Each reader takes the table of its own diagnostic; one that is not there has no rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qaudit.saved.decode import Row
from qaudit.saved.rows import named_interval
from qaudit.types import NotDiagnosed, SensitivityRow, WeightRow

Tables = Mapping[str, Any]
"""`diagnostics` of an audit."""


def weight_rows(tables: Tables) -> tuple[WeightRow, ...]:
    """Return what is said of weights: of whole models and of roles."""
    return tuple(row.build(WeightRow) for row in _rows(tables, "weights"))


def sensitivity_rows(tables: Tables) -> tuple[SensitivityRow, ...]:
    """Return what parts of models add, each by itself, and the mixtures."""
    names = ("absolute_change", "relative_error", "share")
    return tuple(
        row.build(SensitivityRow, {name: named_interval(row, name) for name in names})
        for row in _rows(tables, "sensitivity")
    )


def not_diagnosed(tables: Tables) -> tuple[NotDiagnosed, ...]:
    """Return which diagnostics subjects went without, and why."""
    return tuple(row.build(NotDiagnosed) for row in _rows(tables, "skipped"))


def _rows(tables: Tables, name: str) -> list[Row]:
    return Row(dict(tables), "audit.diagnostics").rows(name) if name in tables else []
