"""Loss and errors by position and by role, of what ships; all others are in `audit.json`."""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.diagnostics.strata.section import TITLE, numbers, shipped
from qaudit.report import document as doc
from qaudit.report.views import View
from qaudit.types import PositionRow, RoleRow

_NUMBERS = ("documents", "loss, nats", "added, %", "KL, nats")
COLUMNS, ROLE_COLUMNS = doc.columns("positions", *_NUMBERS), doc.columns("role", *_NUMBERS)


def section(view: View) -> doc.Section:
    diagnostics = view.audit.diagnostics
    blocks = [
        block
        for cell in shipped(view)
        for block in (*_roles(cell, diagnostics.roles), *_positions(cell, diagnostics.positions))
    ]
    return doc.Section(TITLE, tuple(blocks), 6)


def _positions(cell: tuple[str, str], rows: Sequence[PositionRow]) -> list[doc.Block]:
    of_cell = [row for row in rows if (row.subject, row.scheme) == cell]
    if len(of_cell) < 2:  # one bin is the whole window
        return []
    cells = tuple(_row(f"{row.first:,} to {row.last:,}", row) for row in of_cell)
    title = f"{cell[0]} at {cell[1]}, by position in the window"
    return [doc.fold(title, doc.TableBlock(COLUMNS, cells))]


def _roles(cell: tuple[str, str], rows: Sequence[RoleRow]) -> list[doc.Block]:
    cells = tuple(_row(row.role, row) for row in rows if (row.subject, row.scheme) == cell)
    title = f"{cell[0]} at {cell[1]}, by role in the conversation"
    return [doc.fold(title, doc.TableBlock(ROLE_COLUMNS, cells))] if cells else []


def _row(name: str, row: PositionRow | RoleRow) -> doc.TableRow:
    return doc.row(name, f"{row.documents:,}", *numbers(row.ce, row.relative_error, row.kl))
