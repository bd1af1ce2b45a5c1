"""Loss and errors by position in the window, of what ships; all others are in `audit.json`."""

from __future__ import annotations

from qaudit.diagnostics.strata.section import TITLE, numbers, shipped
from qaudit.report.document import Block, Section, Table, columns, fold, row
from qaudit.report.views import View
from qaudit.types import PositionRow

COLUMNS = columns("positions", "documents", "loss, nats", "added, %", "KL, nats")


def section(view: View) -> Section:
    """Return a folded table for each subject and scheme that ships."""
    rows = view.audit.diagnostics.positions
    blocks = [block for cell in shipped(view) for block in _cell(cell, rows)]
    return Section(TITLE, tuple(blocks), 6)


def _cell(cell: tuple[str, str], rows: tuple[PositionRow, ...]) -> list[Block]:
    own = [one for one in rows if (one.subject, one.scheme) == cell]
    if len(own) < 2:  # one bin is the whole window
        return []
    cells = tuple(
        row(
            f"{one.first:,} to {one.last:,}",
            f"{one.documents:,}",
            *numbers(one.ce, one.relative_error, one.kl),
        )
        for one in own
    )
    return [fold(f"{cell[0]} at {cell[1]}, by position in the window", Table(COLUMNS, cells))]
