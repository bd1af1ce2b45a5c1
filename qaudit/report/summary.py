"""The verdict and the table in 80 columns of plain text, for the end of a scan.

Without colour: what matters is said in words and marks. Widths are counted in columns of the
terminal, so that names in any script keep the table straight.
"""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.report.format import NOT_MEASURED, loss, percent, printable
from qaudit.report.marks import BREACH, UNCLEAR, marks
from qaudit.report.sparkline import sparklines
from qaudit.report.telling import telling
from qaudit.report.verdict import pick_reasons, standing, verdict
from qaudit.report.views import View
from qaudit.report.width import padded, shortened, width_of, wrapped
from qaudit.types import FULL_PRECISION, Audit, Subject

WIDTH = 80
LONGEST_LABEL = 24


def render_terminal(audit: Audit) -> str:
    """Render the verdict, the pick, the table of relative errors, and their course."""
    view = View(audit)
    parts = [filled(text) for text in _said(view)]
    if view.schemes:
        shown = telling(view)
        parts += [filled(_legend(view, len(shown))), *_tables(view, shown)]
        parts += _course(view)
    parts += [
        filled(f"Skipped {s.subject}{f' under {s.scheme}' if s.scheme else ''}: {s.reason}")
        for s in audit.skipped
    ]
    return "\n\n".join(parts) + "\n"


def filled(text: str) -> str:
    """Return a paragraph of plain text, names without their backticks."""
    return wrapped(printable(text.replace("`", "")), WIDTH)


def _said(view: View) -> list[str]:
    said = [verdict(view), " ".join(standing(view)), " ".join(pick_reasons(view))]
    return [text for text in said if text]


def _course(view: View) -> list[str]:
    """Return the lines that show the error along the series."""
    head, *lines = sparklines(view) or [""]
    return [wrapped(head, WIDTH), "\n".join(lines)] if lines else []


def _legend(view: View, shown: int) -> str:
    found = set(marks(view).values())
    signs = ["- not measured", "0 no change"]
    signs += [f"{BREACH} over its margin"] if BREACH in found else []
    signs += [f"{UNCLEAR} not to be told"] if UNCLEAR in found else []
    text = f"Relative error in %, without its interval ({', '.join(signs)}):"
    if shown < len(view.subjects):
        text += f" {shown} of {len(view.subjects)} subjects, all of them in audit.json."
    return text


def _tables(view: View, shown: Sequence[Subject]) -> list[str]:
    """Set as many schemes side by side as there is room for, then start another table."""
    labels = _column(["", "", *_labels(shown)], "<")
    full = [
        NOT_MEASURED if score is None else loss(score.ce)
        for score in (view.score(subject.label) for subject in shown)
    ]
    head = [
        f"{a} {b}" for a, b in zip(labels, _column(["", FULL_PRECISION, *full], ">"), strict=True)
    ]
    tables, lines = [], head
    for scheme in view.schemes:
        column = _column(_cells(view, scheme, shown), ">")
        if lines is not head and width_of(lines[0]) + 1 + width_of(column[0]) > WIDTH:
            tables.append(lines)
            lines = head
        lines = [f"{line} {cell}" for line, cell in zip(lines, column, strict=True)]
    return ["\n".join(line.rstrip() for line in table) for table in [*tables, lines]]


def _column(cells: list[str], align: str) -> list[str]:
    width = max(map(width_of, cells))
    return [padded(cell, width, align) for cell in cells]


def _heading(scheme: str) -> tuple[str, str]:
    name, _, variant = shortened(printable(scheme), LONGEST_LABEL).partition("-")
    return (name, variant) if variant else ("", name)


def _cells(view: View, scheme: str, shown: Sequence[Subject]) -> list[str]:
    """Return a column: its heading, and its errors with a place for marks where there are any."""
    marked = [marks(view).get((subject.label, scheme), "") for subject in shown]
    place = " " if any(marked) else ""
    errors = []
    for subject, mark in zip(shown, marked, strict=True):
        score = view.score(subject.label, scheme)
        error = None if score is None else score.relative_error
        text = NOT_MEASURED if error is None else percent(error, bounds=False)
        errors.append(text + (mark or place))
    return [*(part + place for part in _heading(scheme)), *errors]


def _labels(shown: Sequence[Subject]) -> list[str]:
    """Shorten long labels in their middle; number them where that makes two of them one."""
    whole = [printable(subject.label) for subject in shown]
    for width in (LONGEST_LABEL, LONGEST_LABEL + 12):
        short = [shortened(label, width) for label in whole]
        if len(set(short)) == len(set(whole)):
            return short
    return [f"{k} {shortened(label, LONGEST_LABEL)}" for k, label in enumerate(whole, 1)]
