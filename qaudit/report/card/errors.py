"""The one table: what quantization adds to the loss of each subject under each scheme.

Of a long series the rows that matter most are shown, the others are minor.
"""

from __future__ import annotations

import math
from dataclasses import replace

from qaudit.report.document import (
    Block,
    Cell,
    Column,
    Mark,
    Row,
    Table,
    cell,
    columns,
    fold,
    name_cell,
    paragraph,
)
from qaudit.report.format import NOT_MEASURED, loss, percent
from qaudit.report.marks import BREACH, UNCLEAR, marks
from qaudit.report.shown_rows import shown_rows
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, Subject

MARKS = {
    BREACH: Mark(BREACH, "over the margin that the policy sets", "breach"),
    UNCLEAR: Mark(
        UNCLEAR,
        "inconclusive, these documents do not decide whether it is over its margin",
        "doubt",
    ),
}
CAPTION = "Relative error of every subject under every scheme, in %, with its interval"
LEGEND = (
    "What quantization adds to the loss, in % of it, with its interval; "
    f"`{NOT_MEASURED}` not measured, `0` no change at all."
)
CHOSEN = (
    "the pick, the best of each column, ends of stages, what a policy objects to, and others "
    "evenly along the series"
)


def errors_section(view: View) -> tuple[Block, ...]:
    """Return the table of relative errors with what it shows."""
    return (paragraph(LEGEND, *_all_at_once(view)), _table(view)) if view.subjects else ()


def every_subject_section(view: View) -> tuple[Block, ...]:
    """Return the whole table, folded, where the first one leaves rows out."""
    table = _table(view)
    if not any(row.minor for row in table.rows):
        return ()
    rows = tuple(replace(row, minor=False) for row in table.rows)
    return (fold(f"All {len(rows)} subjects", replace(table, rows=rows)),)


def _table(view: View) -> Table:
    labels = tuple(subject.label for subject in view.subjects)
    schemes = (FULL_PRECISION, *view.schemes)
    best = {scheme: view.best(scheme, labels) for scheme in schemes}
    marked = marks(view)
    shown = {subject.label for subject in shown_rows(view)}

    def one(subject: Subject, scheme: str) -> Cell:
        mark = MARKS.get(marked.get((subject.label, scheme), ""))
        return replace(
            _cell(view, subject.label, scheme), mark=mark, strong=subject.label == best[scheme]
        )

    rows = tuple(
        Row(
            (name_cell(subject.label, value=k), *(one(subject, scheme) for scheme in schemes)),
            minor=subject.label not in shown,
        )
        for k, subject in enumerate(view.subjects)
    )
    return Table(
        (
            Column("subject"),
            Column("loss, full precision", short=FULL_PRECISION),
            *columns(*view.schemes),
        ),
        rows,
        CAPTION,
        strong="the lowest loss of its column",
        chosen=CHOSEN,
        name="errors",
    )


def _cell(view: View, subject: str, scheme: str) -> Cell:
    """Show an error over its interval; a loss where an error has no meaning."""
    score = view.score(subject, scheme)
    if score is None:
        return cell(NOT_MEASURED)
    if scheme == FULL_PRECISION:
        return cell(loss(score.ce), value=score.ce.estimate)
    if score.relative_error is None:
        return cell(f"loss {loss(score.ce)}")
    text, bracket, bounds = percent(score.relative_error).partition(" [")
    value = score.relative_error.estimate
    return cell(
        text,
        value=value if math.isfinite(value) else None,
        small=f"[{bounds}" if bracket else "",
    )


def _all_at_once(view: View) -> list[str]:
    """Say how wide the intervals would be if all of them had to hold together."""
    from qaudit.core.statistics import MINIMUM_DOCUMENTS, widening  # loads scipy

    cells = sum(
        score is not None and score.relative_error is not None
        for subject in view.subjects
        for score in (view.score(subject.label, scheme) for scheme in view.schemes)
    )
    if cells < 2 or view.documents < MINIMUM_DOCUMENTS:
        return []
    factor = widening(view.audit.plan.recipe.confidence, cells, view.documents)
    return [
        f"Each interval holds by itself; for all {cells} to hold at once, read them "
        f"{factor:.1f} times as wide."
    ]
