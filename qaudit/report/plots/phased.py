"""Where the course of an error changes, marked on the picture of the series.

A strip above the axis for each scheme that has a change point, as wide as its interval, with a
tick at the estimate; and one at the top for where full-precision loss stops improving. Strips lie
beside the lines and hide none of them. Nothing is drawn where nothing can be told.
"""

from __future__ import annotations

from matplotlib.axes import Axes

from qaudit.report.looks import FAINT, styles
from qaudit.report.series import Axis
from qaudit.report.views import View
from qaudit.saved.phased import changed, main_course
from qaudit.types.phased import Course

STRIP = 0.016  # of the height of the axes, with the gap beneath it
LEAST = 0.004  # of the width: an end that is known to a checkpoint is seen


def mark_phases(axes: Axes, view: View, where: Axis) -> list[str]:
    """Draw the strips; return what the key has to say of them."""
    course = main_course(view)
    if course is None or not _is_placed(course, where):
        return []
    said, extent = [], course.positions[-1] - course.positions[0]
    for k, row in enumerate(changed(course)):
        assert row.at is not None
        bottom = STRIP * (k + 0.3)
        colour = styles(view.schemes)[row.scheme][0]
        axes.axvspan(
            row.at.low, row.at.high, ymin=bottom, ymax=bottom + 0.6 * STRIP,
            color=colour, alpha=0.55, lw=0, zorder=1,
        )  # fmt: skip
        axes.axvline(row.at.estimate, ymin=bottom, ymax=bottom + 1.3 * STRIP, color=colour, lw=1.6)
    if changed(course):
        said.append("strips below: change points")
    if course.loss_end is not None:
        low, high = course.loss_end.low, max(course.loss_end.high, course.loss_end.low)
        high = max(high, low + LEAST * extent)
        axes.axvspan(low, high, ymin=1 - STRIP, ymax=1, color=FAINT, alpha=0.6, lw=0, zorder=1)
        said.append("strip above: full-precision loss stops improving")
    return said


def _is_placed(course: Course, where: Axis) -> bool:
    """Say whether the course stands where the picture has its checkpoints."""
    placed = zip(course.checkpoints, course.positions, strict=True)
    return where.name == course.unit and all(where.positions.get(c) == x for c, x in placed)
