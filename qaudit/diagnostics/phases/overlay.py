"""Where the course of an error changes: a strip for each scheme beneath its lines.

As wide as the change point's interval, with a tick at the estimate; a strip at the top shows where
full-precision loss stops improving.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qaudit.diagnostics.phases.section import changed, main_course
from qaudit.report.chart import FAINT, POINT, looks
from qaudit.report.series import Axis
from qaudit.report.views import View
from qaudit.types import Course

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(view: View, axes: Axes, where: Axis) -> None:
    """Draw the strips of the main course, if its checkpoints have the places of the figure."""
    course = _placed(view, where)
    if course is None:
        return
    style: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "zorder": 3}
    style["solid_capstyle"] = "butt"
    for k, row in enumerate(changed(course)):
        assert row.at is not None
        colour, y = looks(view.schemes)[row.scheme]["color"], 0.015 + 0.02 * k
        ends = [row.at.low, row.at.high]
        axes.plot(ends, [y, y], color=colour, lw=4 * POINT, alpha=0.6, **style)
        axes.plot([row.at.estimate] * 2, [y - 0.012, y + 0.012], color=colour, **style)
    if course.loss_end is not None:
        ends = [course.loss_end.low, course.loss_end.high]
        axes.plot(ends, [0.99, 0.99], color=FAINT, lw=4 * POINT, **style)


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
