"""What the widths of relative errors come from, for each scheme at the last checkpoint."""

from __future__ import annotations

from qaudit.report import sentences
from qaudit.report.document import Block, Row, Table, cell, columns, paragraph
from qaudit.report.format import NOT_MEASURED, percent, points
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, Noise

COLUMNS = columns("scheme", "relative error, %", "documents", "one draw", "rounding")


def noise_section(view: View) -> tuple[Block, ...]:
    """Name the sources of noise and, where calibration was repeated, how much each makes."""
    if not view.audit.measurements:
        return ()
    said = paragraph(sentences.noise(view))
    rows = view.audit.diagnostics.noise
    shown = [row for row in rows if view.last and row.subject == view.last.label]
    drawn = [row for row in shown or rows if row.scheme != FULL_PRECISION]
    if not drawn:
        return (said,)
    label = drawn[0].subject
    drawn = [row for row in drawn if row.subject == label]
    full = [row for row in shown if row.scheme == FULL_PRECISION]
    budget = paragraph(sentences.noise_budget(label, drawn, full))
    return said, budget, Table(COLUMNS, tuple(map(_row, drawn)))


def _row(row: Noise) -> Row:
    share = row.share_of_draw
    texts = [
        row.scheme,
        NOT_MEASURED if row.interval is None else percent(row.interval),
        _part(row.documents, None if share is None else 1 - share),
        _part(row.draw, share),
        _part(row.numerical, None),
    ]
    return Row(tuple(map(cell, texts)))


def _part(part: float | None, share: float | None) -> str:
    """Print a part of a relative error in percentage points, and its share of the width."""
    if part is None:
        return NOT_MEASURED
    return points(part) + ("" if share is None else f" ({100 * share:.0f} %)")
