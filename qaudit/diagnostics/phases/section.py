"""The section `Phases`: where the course of a run changes, and what its error correlates with.

Only the longest run is shown; the others are in `audit.json`.
"""

from __future__ import annotations

from qaudit.diagnostics.phases.summary import main_course, sentences_of
from qaudit.report.document import (
    Block,
    Row,
    Section,
    Table,
    bullets,
    columns,
    fold,
    name_cell,
    paragraph,
    row,
    words,
)
from qaudit.report.format import NOT_MEASURED, listing, plural
from qaudit.report.views import View
from qaudit.types import CorrelationRow, Course, Interval

TITLE = "Phases"
COLUMNS = columns("quantity", "checkpoints", "worth", "of ranks", "of steps", "at equal places")
LEGEND = (
    "Correlations of ranks with the relative error under {scheme}, with intervals. Checkpoints of "
    "one run are no independent draws: `worth` is how many independent ones they equal, `steps` "
    "are the differences from one to the next. What correlates with an error need not cause it."
)


def section(view: View) -> Section:
    """Return the sentences and the correlations of the longest run."""
    course = main_course(view)
    if course is None:
        return Section(TITLE, (), 5)
    others = len(view.audit.diagnostics.phases) - 1
    more = [paragraph(f"{plural(others, 'more run')} in `audit.json`.")] if others else []
    return Section(TITLE, (bullets(*sentences_of(course)), *_together(view, course), *more), 5)


def _together(view: View, course: Course) -> tuple[Block, ...]:
    schemes = dict.fromkeys(row.scheme for row in course.correlations)
    pick = view.audit.pick.scheme if view.audit.pick else ""
    scheme = pick if pick in schemes else next(iter(schemes), "")
    rows = [one for one in course.correlations if one.scheme == scheme]
    shown = tuple(_row(one) for one in rows if one.ranks is not None)
    if not shown:
        return ()
    left = [f"{one.quantity}, {one.reason}" for one in rows if one.reason]
    note = [paragraph(words(f"Left out: {listing(left)}."))] if left else []
    legend = paragraph(LEGEND.format(scheme=scheme.replace("`", "'")))
    title = f"What the relative error under {scheme} correlates with"
    return (fold(title, legend, Table(COLUMNS, shown), *note),)


def _row(one: CorrelationRow) -> Row:
    worth = NOT_MEASURED if one.effective_points is None else f"{one.effective_points:.1f}"
    numbers = [_number(value) for value in (one.ranks, one.differences, one.at_equal_tokens)]
    return row(name_cell(one.quantity), str(one.points), worth, *numbers)


def _number(correlation: Interval | None) -> str:
    if correlation is None:
        return NOT_MEASURED
    low, high = correlation.low, correlation.high
    return f"{correlation.estimate:.2f} [{low:.2f}, {high:.2f}]"
