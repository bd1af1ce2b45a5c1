"""Loss and errors by position in the window, of what ships; all others are in `audit.json`."""

from __future__ import annotations

from qaudit.diagnostics.strata.section import TITLE, numbers, shipped
from qaudit.report import document as doc
from qaudit.report.views import View
from qaudit.types import PositionRow

COLUMNS = doc.columns("positions", "documents", "loss, nats", "added, %", "KL, nats")


def section(view: View) -> doc.Section:
    """Return a folded table for each subject and scheme that ships."""
    rows = view.audit.diagnostics.positions
    blocks = [block for cell in shipped(view) for block in _cell(cell, rows)]
    return doc.Section(TITLE, tuple(blocks), 6)


def _cell(cell: tuple[str, str], rows: tuple[PositionRow, ...]) -> list[doc.Block]:
    rows_of_cell = [row for row in rows if (row.subject, row.scheme) == cell]
    if len(rows_of_cell) < 2:  # one bin is the whole window
        return []
    cells = tuple(
        doc.row(
            f"{row.first:,} to {row.last:,}",
            f"{row.documents:,}",
            *numbers(row.ce, row.relative_error, row.kl),
        )
        for row in rows_of_cell
    )
    return [
        doc.fold(
            f"{cell[0]} at {cell[1]}, by position in the window", doc.TableBlock(COLUMNS, cells)
        )
    ]
