"""Loss and errors by where in its window a token is; bins of a cell hold at once."""

from __future__ import annotations

from dataclasses import replace

from qaudit.diagnostics.strata.judge import columns_of
from qaudit.judge.table import Measurements
from qaudit.types import Diagnostics, Finding, PositionRow, Positions


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    return replace(diagnostics, positions=position_rows(table)), ()


def position_rows(table: Measurements) -> tuple[PositionRow, ...]:
    """Return a row for each subject, scheme and bin of positions that has tokens."""
    return tuple(
        PositionRow(first=int(bins.edges[b]), last=int(bins.edges[b + 1]) - 1, **columns)
        for cell in table.cells
        for bins, b, columns in columns_of(table, cell, "positions", Positions)
    )
