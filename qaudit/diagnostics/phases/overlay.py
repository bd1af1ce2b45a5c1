"""Where the course of an error changes: a strip for each scheme beneath its lines.

As wide as the change point's interval, with a tick at the estimate; a strip at the top shows where
full-precision loss stops improving.
"""

from __future__ import annotations

from collections.abc import Iterator

from qaudit.diagnostics.phases.section import changed, main_course
from qaudit.report.figures.drawing import Box, Part, line
from qaudit.report.figures.frame import Scale
from qaudit.report.figures.style import looks
from qaudit.report.series import Axis
from qaudit.report.views import View
from qaudit.types import Course, Interval, Span

STRIP = 4.0
LEAST = 3.0  # pixels of an interval without width


def strips(view: View, where: Axis, along: Scale, top: float, bottom: float) -> Iterator[Part]:
    """Draw the strips of the main course, if its checkpoints have the places of the figure."""
    course = _placed(view, where)
    if course is None:
        return
    for k, row in enumerate(changed(course)):
        assert row.at is not None
        colour = looks(view.schemes)[row.scheme].colour
        x, y = along.at(row.at.estimate), bottom - (k + 1) * (STRIP + 2)
        yield _strip(row.at, along, y, colour)
        yield line(x, y - 2, x, y + STRIP + 2, f"whisker bold {colour}")
    if course.loss_end is not None:
        yield _strip(course.loss_end, along, top, "faint")


def explained(view: View, where: Axis) -> list[str]:
    """Return the meaning of the strips, as far as there are any."""
    course = _placed(view, where)
    if course is None:
        return []
    below = ["strips below: change points"] if changed(course) else []
    above = "strip above: full-precision loss stops improving"
    return [*below, above] if course.loss_end is not None else below


def _placed(view: View, where: Axis) -> Course | None:
    course = main_course(view)
    if course is None or where.name != course.unit:
        return None
    places = zip(course.checkpoints, course.positions, strict=True)
    return course if all(where.positions.get(label) == x for label, x in places) else None


def _strip(interval: Interval | Span, along: Scale, y: float, colour: str) -> Box:
    begin, end = along.at(interval.low), along.at(interval.high)
    return Box(begin, y, max(end - begin, LEAST), STRIP, f"strip {colour}")
