"""Rows of every bin of positions, from the evidence of each measurement."""

from __future__ import annotations

from dataclasses import replace

from qaudit.judge.positions import position_rows
from qaudit.judge.table import Table
from qaudit.types import Diagnostics, Finding


def judge(table: Table, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the diagnostics with losses by position, and no finding."""
    return replace(diagnostics, positions=position_rows(table)), ()
