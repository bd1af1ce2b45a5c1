"""Trace and largest eigenvalue of the Hessian along the series, with their scatter."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from qaudit.report.format import count
from qaudit.report.plots.style import FAINT, INK, METHOD_COLOURS, drawable, new_figure
from qaudit.report.series import axis, soup_position, trunk
from qaudit.report.views import View
from qaudit.saved.curvature import whole_models
from qaudit.types import CurvatureRow

LOGARITHMIC = 20  # times from the lowest to the highest


def curvature(view: View) -> Figure:
    """Draw the trace above and the largest eigenvalue below, where there is one."""
    models = whole_models(view)
    has_eigenvalues = any(row.eigenvalues for row in models.values())
    figure = new_figure(8.5, 5.2 if has_eigenvalues else 3.4)
    grid = figure.subplots(2 if has_eigenvalues else 1, 1, sharex=True, squeeze=False)[:, 0]
    _panel(grid[0], view, models, _trace, METHOD_COLOURS[0])
    grid[0].set_ylabel("trace")
    grid[0].set_title("How sharp the loss is, along the series", loc="left")
    if has_eigenvalues:
        _panel(grid[1], view, models, _largest, METHOD_COLOURS[1])
        grid[1].set_ylabel("largest eigenvalue")
    where = axis(view)
    grid[-1].set_xlabel(where.name)
    grid[-1].xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(round(x))))
    return figure


Values = tuple[float, float, float]
"""Low, estimate, high."""


def _trace(row: CurvatureRow) -> Values:
    found = row.trace_elsewhere or row.trace
    return drawable(found.low), found.estimate, drawable(found.high)


def _largest(row: CurvatureRow) -> Values | None:
    if not row.eigenvalues:
        return None
    value, residual = row.eigenvalues[0], drawable(row.residuals[0])
    return value - residual, value, value + residual


def _panel(
    axes: Axes,
    view: View,
    models: dict[str, CurvatureRow],
    read: Callable[[CurvatureRow], Values | None],
    colour: str,
) -> None:
    where = axis(view)
    values = {label: found for label, row in models.items() if (found := read(row)) is not None}
    main = [s.label for s in trunk(view) if s.label in values]
    x = [where.positions[label] for label in main]
    axes.plot(x, [values[label][1] for label in main], "-o", ms=4, lw=1.5, color=colour)
    axes.fill_between(
        x,
        [values[label][0] for label in main],
        [values[label][2] for label in main],
        color=colour,
        alpha=0.16,
        lw=0,
    )
    others = [s for s in view.checkpoints if s.label in values and s.label not in main]
    for subject in others:
        _mark(axes, where.positions[subject.label], values[subject.label], "o", colour)
    for k, soup in enumerate(s for s in view.soups if s.label in values):
        _mark(axes, soup_position(where, k), values[soup.label], "*", colour)
    lowest = min(found[0] for found in values.values())
    highest = max(found[1] for found in values.values())
    if lowest > 0 and highest > LOGARITHMIC * lowest:
        axes.set_yscale("log")
    for end in sorted(where.stage_ends.values())[:-1]:
        axes.axvline(end, color=FAINT, lw=0.9, ls=(0, (4, 3)), zorder=0)
    axes.grid(axis="y", color=FAINT, alpha=0.25, lw=0.6)
    marks = ["band: interval over probes and documents" if read is _trace else ""]
    marks += ["hollow: other ingredients"] if others else []
    marks += ["star: soup"] if any(s.label in values for s in view.soups) else []
    axes.annotate(
        "; ".join(filter(None, marks)), (0.01, 0.97), xycoords="axes fraction", va="top",
        color=FAINT, fontsize=8,
    )  # fmt: skip


def _mark(axes: Axes, x: float, found: Values, marker: str, colour: str) -> None:
    low, middle, high = found
    axes.plot([x, x], [low, high], "-", lw=1, color=colour, alpha=0.6)
    fill = INK if marker == "*" else "white"
    axes.plot([x], [middle], marker, ms=10 if marker == "*" else 5, color=colour, mfc=fill)
