"""Phases: where the course of a run changes, and what its error goes along with.

Of several runs the longest is shown in full; the others are in `audit.json`.
"""

from __future__ import annotations

from qaudit.report.format import NOT_MEASURED, listing, plural, printable
from qaudit.report.markdown import cell, folded, plain, prose, table
from qaudit.report.phase_sentences import sentences_of
from qaudit.report.views import View
from qaudit.saved.phased import courses_of, main_course
from qaudit.types import Interval
from qaudit.types.phased import CorrelationRow, Course

HEADER = ["quantity", "checkpoints", "worth", "of ranks", "of steps", "at equal places"]
LEGEND = (
    "Correlations of ranks with the relative error under {scheme}, with intervals. Checkpoints of "
    "one run are no independent draws: *worth* is how many independent ones they stand for, "
    "*steps* are the differences from one to the next. What goes along with an error need not be "
    "what makes it."
)


def phases_section(view: View) -> str:
    """Return what the longest run shows, and what its error goes along with."""
    course = main_course(view)
    if course is None:
        return ""
    said = "\n".join(f"- {prose(sentence)}" for sentence in sentences_of(course))
    others = len(courses_of(view.audit)) - 1
    more = f"{plural(others, 'more run')} in `audit.json`." if others else ""
    return "\n\n".join(filter(None, [said, _together(view, course), more]))


def _together(view: View, course: Course) -> str:
    schemes = dict.fromkeys(row.scheme for row in course.correlations)
    pick = view.audit.pick.scheme if view.audit.pick else ""
    scheme = pick if pick in schemes else next(iter(schemes), "")
    rows = [row for row in course.correlations if row.scheme == scheme]
    shown = [row for row in rows if row.ranks is not None]
    if not shown:
        return ""
    left = [f"{row.quantity}, {row.reason}" for row in rows if row.reason]
    note = [plain(f"Left out: {listing(left)}.")] if left else []
    legend = LEGEND.format(scheme=plain(printable(scheme)))
    body = [legend, table(HEADER, [_cells(row) for row in shown]), *note]
    return folded(f"What the relative error under {scheme} goes along with", "\n\n".join(body))


def _cells(row: CorrelationRow) -> list[str]:
    worth = NOT_MEASURED if row.effective_points is None else f"{row.effective_points:.1f}"
    numbers = [_number(found) for found in (row.ranks, row.differences, row.at_equal_tokens)]
    return [cell(row.quantity), str(row.points), worth, *numbers]


def _number(found: Interval | None) -> str:
    if found is None:
        return NOT_MEASURED
    return f"{found.estimate:.2f} [{found.low:.2f}, {found.high:.2f}]"
