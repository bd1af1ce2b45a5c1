"""Accuracy on multiple-choice items, and the drop as a share of what was left to get wrong."""

from __future__ import annotations

from qaudit.report.document import Block, Row, Table, columns, fold, name_cell, row
from qaudit.report.format import NOT_MEASURED, percent, plural
from qaudit.report.views import View
from qaudit.types import TaskRow

COLUMNS = columns("subject", "scheme", "accuracy, %", "drop / (1 - accuracy), %", "items")


def tasks_section(view: View) -> tuple[Block, ...]:
    """Return the folded table of accuracies, if choices were scored."""
    rows = tuple(map(_row, view.audit.tasks))
    return (fold(plural(len(rows), "score"), Table(COLUMNS, rows)),) if rows else ()


def _row(task: TaskRow) -> Row:
    drop = task.accuracy_drop
    return row(
        name_cell(task.subject),
        task.scheme,
        percent(task.accuracy),
        NOT_MEASURED if drop is None else percent(drop),
        str(task.items),
    )
