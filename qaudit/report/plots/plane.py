"""The loss on the way to the quantized model, and the slice that the checkpoint before spans.

Contours carry their numbers, and the scale runs from dark to light for every kind of colour
vision; the three models are told apart by shape and name.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import AbstractPathEffect, withStroke

from qaudit.report.plots.style import (
    FAINT,
    GROUND,
    INK,
    METHOD_COLOURS,
    drawable,
    name,
    new_figure,
)
from qaudit.report.views import View
from qaudit.saved.curvature import Line, grid, shown_lines
from qaudit.types import PlaneRow

LOOKS = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))
LEVELS = 11


def plane(view: View) -> Figure:
    """Draw the lines, and beside them the grid where there is one."""
    points = grid(view)
    figure = new_figure(8.5, 4.2) if points else new_figure(6.5, 4.0)
    if points:
        left, right = figure.subplots(1, 2)
        _grid(right, points)
    else:
        left = figure.subplots()
    _lines(left, shown_lines(view))
    return figure


def _lines(axes: Axes, lines: list[Line]) -> None:
    for k, line in enumerate(lines):
        colour = METHOD_COLOURS[k % len(METHOD_COLOURS)]
        style, marker = LOOKS[k % len(LOOKS)]
        b = [place for place, _ in line.points]
        axes.plot(
            b, [change.estimate for _, change in line.points], style, marker=marker, ms=4, lw=1.5,
            color=colour, label=name(line.subject, 30),
        )  # fmt: skip
        low, high = (
            [drawable(getattr(change, side)) for _, change in line.points]
            for side in ("low", "high")
        )
        axes.fill_between(b, low, high, color=colour, alpha=0.16, lw=0)
    for place in (0, 1):
        axes.axvline(place, color=FAINT, lw=0.9, ls=(0, (4, 3)), zorder=0)
    axes.set_xticks([0, 0.5, 1], ["as it is", "halfway", name(lines[0].scheme, 20)])
    axes.set_ylabel("change of the loss, nats per token")
    axes.set_title("On the way to the quantized model", loc="left", fontsize=9.5)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.grid(axis="y", color=FAINT, alpha=0.25, lw=0.6)


def _grid(axes: Axes, points: list[PlaneRow]) -> None:
    """Draw contours of the loss; up is towards the checkpoint before, right is quantization."""
    a_values, b_values = (sorted({getattr(p, axis) for p in points}) for axis in ("a", "b"))
    known = {(p.a, p.b): p.ce.estimate for p in points}
    loss_AB = np.array([[known.get((a, b), np.nan) for b in b_values] for a in a_values])
    # Equal steps in the distance from a minimum, of which the loss is the square.
    low, high = float(np.nanmin(loss_AB)), float(np.nanmax(loss_AB))
    levels = np.unique(low + (high - low) * np.linspace(0, 1, LEVELS) ** 2)
    if len(levels) > 2:
        axes.contourf(b_values, a_values, loss_AB, levels=levels, cmap="cividis")
        drawn = axes.contour(
            b_values, a_values, loss_AB, levels=levels[1:-1], colors=GROUND, linewidths=0.7
        )
        edge: list[AbstractPathEffect] = [withStroke(linewidth=1.6, foreground=INK)]
        for text in axes.clabel(drawn, fontsize=7, fmt="%.3g"):
            text.set_path_effects(edge)
    _models(axes, points[0])
    axes.locator_params(nbins=5)
    axes.set_xlabel("towards the quantized model")
    axes.set_ylabel("towards the checkpoint before")
    axes.set_title(f"Loss around {name(points[0].subject, 28)}", loc="left", fontsize=9.5)


def _models(axes: Axes, point: PlaneRow) -> None:
    """Mark and name the three models."""
    named = (
        (0, 0, "o", "as it is"),
        (1, 0, "s", point.scheme),
        (0, 1, "^", point.previous or "the one before"),
    )
    edge: list[AbstractPathEffect] = [withStroke(linewidth=2.2, foreground=INK)]
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    for b, a, marker, text in named:
        axes.plot([b], [a], marker, ms=8, color="white", mec=INK, mew=1.3, zorder=5, clip_on=False)
        leftwards, downwards = b > 0.6 * right, a > 0.8 * top
        axes.annotate(
            name(text, 22), (b, a), (-7 if leftwards else 7, -13 if downwards else 6),
            textcoords="offset points", ha="right" if leftwards else "left", color="white",
            fontsize=8, fontweight="bold", path_effects=edge, zorder=6,
        )  # fmt: skip
