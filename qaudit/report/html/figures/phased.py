"""Where the course of an error changes: a strip for each scheme beneath its figure's lines.

As wide as the change point's interval, with a tick at the estimate; a strip at the top says where
full-precision loss stops improving. Nothing is drawn where nothing can be told.
"""

from __future__ import annotations

from qaudit.report.elements import EMPTY, Html, element, joined
from qaudit.report.html.figures import frame
from qaudit.report.html.figures.frame import Scale
from qaudit.report.looks import FAINT, styles
from qaudit.report.series import Axis
from qaudit.report.views import View
from qaudit.saved.phased import changed, main_course
from qaudit.types import Interval
from qaudit.types.phased import Course, Span

STRIP = 4.0
LEAST = 3.0  # an end that is known to a checkpoint is seen


def strips(view: View, where: Axis, along: Scale, top: float, bottom: float) -> Html:
    """Draw the strips of the main course, where it stands as the figure has it."""
    course = _placed(view, where)
    if course is None:
        return EMPTY
    parts = []
    for k, row in enumerate(changed(course)):
        assert row.at is not None
        shade = styles(view.schemes)[row.scheme][0]
        y = bottom - (k + 1) * (STRIP + 2)
        parts += [_strip(row.at, along, y, frame.colour(shade))]
        x = along.at(row.at.estimate)
        parts += [frame.line(x, y - 2, x, y + STRIP + 2, f"whisker bold {frame.colour(shade)}")]
    if course.loss_end is not None:
        parts += [_strip(course.loss_end, along, top, frame.colour(FAINT))]
    return joined(parts)


def explained(view: View, where: Axis) -> list[str]:
    """Say what the strips are, as far as there are any."""
    course = _placed(view, where)
    if course is None:
        return []
    said = ["strips below: change points"] if changed(course) else []
    above = "strip above: full-precision loss stops improving"
    return [*said, above] if course.loss_end is not None else said


def _placed(view: View, where: Axis) -> Course | None:
    course = main_course(view)
    if course is None or where.name != course.unit:
        return None
    places = zip(course.checkpoints, course.positions, strict=True)
    return course if all(where.positions.get(label) == x for label, x in places) else None


def _strip(found: Interval | Span, along: Scale, y: float, kind: str) -> Html:
    begin, end = along.at(found.low), along.at(found.high)
    wide = max(end - begin, LEAST)
    return element("rect", x=begin, y=y, width=wide, height=STRIP, class_=f"strip {kind}")
