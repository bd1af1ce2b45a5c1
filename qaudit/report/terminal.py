"""The verdict and the table in 80 columns of plain text, for the end of a scan."""

from __future__ import annotations

import textwrap

from qaudit.report import sentences
from qaudit.report.format import NOT_MEASURED, loss, percent, printable
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, Audit

WIDTH = 80
LONGEST_LABEL = 24


def render_terminal(audit: Audit) -> str:
    """Render the verdict, the pick and the table of relative errors."""
    view = View(audit)
    said = [sentences.verdict(view), " ".join(sentences.pick_reasons(view))]
    skipped = [
        f"Skipped {s.subject}{f' under {s.scheme}' if s.scheme else ''}: {s.reason}"
        for s in audit.skipped
    ]
    legend = "Relative error in %, without its interval (- not measured, 0 no change):"
    parts = [filled(text) for text in said]
    if view.schemes:
        parts += [legend, *_tables(view)]
    return "\n\n".join([*parts, *map(filled, skipped)]) + "\n"


def filled(text: str) -> str:
    """Return a paragraph of plain text, names without their backticks."""
    return textwrap.fill(printable(text.replace("`", "")), WIDTH)


def _tables(view: View) -> list[str]:
    """Set as many schemes side by side as there is room for, then start another table."""
    labels = _column(["", "", *_labels(view)], "<")
    full = [
        NOT_MEASURED if score is None else loss(score.ce)
        for score in (view.score(subject.label) for subject in view.subjects)
    ]
    head = [
        f"{a} {b}" for a, b in zip(labels, _column(["", FULL_PRECISION, *full], ">"), strict=True)
    ]
    tables, lines = [], head
    for scheme in view.schemes:
        column = _column([*_heading(scheme), *_cells(view, scheme)], ">")
        if lines is not head and len(lines[0]) + 1 + len(column[0]) > WIDTH:
            tables.append(lines)
            lines = head
        lines = [f"{line} {cell}" for line, cell in zip(lines, column, strict=True)]
    return ["\n".join(line.rstrip() for line in table) for table in [*tables, lines]]


def _column(cells: list[str], align: str) -> list[str]:
    width = max(map(len, cells))
    return [f"{cell:{align}{width}}" for cell in cells]


def _heading(scheme: str) -> tuple[str, str]:
    name, _, variant = printable(scheme).partition("-")
    return (name, variant) if variant else ("", name)


def _cells(view: View, scheme: str) -> list[str]:
    scores = [view.score(subject.label, scheme) for subject in view.subjects]
    return [
        NOT_MEASURED
        if score is None or score.relative_error is None
        else percent(score.relative_error, bounds=False)
        for score in scores
    ]


def _labels(view: View) -> list[str]:
    """Shorten long labels in their middle, unless that makes two of them one."""
    whole = [printable(subject.label) for subject in view.subjects]
    half = LONGEST_LABEL // 2 - 1
    short = [t if len(t) <= LONGEST_LABEL else f"{t[:half]}..{t[-half:]}" for t in whole]
    return short if len(set(short)) == len(short) else whole
