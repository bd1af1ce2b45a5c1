"""Accuracy on multiple-choice items, and the drop as a share of what was left to get wrong."""

from __future__ import annotations

from qaudit.report.format import NOT_MEASURED, percent, plural
from qaudit.report.markdown import cell, folded, plain, table
from qaudit.report.views import View
from qaudit.types import TaskRow

HEADER = ["subject", "scheme", "accuracy, %", "drop / (1 - accuracy), %", "items"]


def tasks_section(view: View) -> str:
    """Return the folded table of accuracies, if choices were scored."""
    rows = [_row(task) for task in view.audit.tasks]
    return folded(plural(len(rows), "score"), table(HEADER, rows)) if rows else ""


def _row(task: TaskRow) -> list[str]:
    return [
        cell(task.subject),
        plain(task.scheme),
        percent(task.accuracy),
        NOT_MEASURED if task.accuracy_drop is None else percent(task.accuracy_drop),
        str(task.items),
    ]
