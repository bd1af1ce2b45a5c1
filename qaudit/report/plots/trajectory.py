"""Relative error along the series, with the learning rate beneath it; lines named at their ends."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from qaudit.report.format import count
from qaudit.report.plots.phased import mark_phases
from qaudit.report.plots.style import FAINT, GROUND, INK, bound, name, new_figure, styles
from qaudit.report.scales import error_scale, mixed_ticks
from qaudit.report.series import (
    Axis,
    axis,
    error_of,
    inside,
    key,
    knows_rates,
    phases,
    soup_position,
    spread_out,
    trunk,
)
from qaudit.report.views import View
from qaudit.types import Interval

LINE_INCHES = 0.185  # of a name beside the axes
MANY = 40  # marks of one line at most; of a longer series every so many have one


def trajectory(view: View) -> Figure:
    """Draw relative error along the series, with the learning rate beneath where it is known."""
    where, rates = axis(view), knows_rates(view)
    tall = max(4.8, LINE_INCHES * len(view.schemes) + 1.6)
    figure = new_figure(8.5, tall + 1.1 if rates else tall)
    if rates:
        ratios = (tall - 1.2, 1)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=ratios, squeeze=True)
    else:
        above = below = figure.subplots()
    ends = {scheme: _line(above, view, where, scheme) for scheme in view.schemes}
    _scale(above, view)
    _marks(above, where)
    for phase in phases(view, where):
        if phase.name == "falls":
            for axes in {above, below}:
                axes.axvspan(phase.begin, phase.end, color=FAINT, alpha=0.09, lw=0, zorder=0)
    marked = mark_phases(above, view, where)
    _name_stages(above, view, where)
    _name_ends(above, view, {s: y for s, y in ends.items() if y is not None})
    above.set_ylabel("relative error of the loss, %")
    above.set_title(
        "What quantization adds to the loss, along the series", loc="left", pad=50 if marked else 38
    )
    above.annotate(
        "\n".join(filter(None, [key(view), "; ".join(marked)])), (0, 1), (0, 26),
        xycoords="axes fraction", textcoords="offset points", va="bottom", color=FAINT, fontsize=8,
    )  # fmt: skip
    if rates:
        _learning_rate(below, view, where)
        _marks(below, where)
        _name_phases(below, view, where)
    below.set_xlabel(where.name)
    below.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(round(x))))
    return figure


def _line(axes: Axes, view: View, where: Axis, scheme: str) -> float | None:
    """Draw one scheme and return the height at which its line ends."""
    colour, line, marker = styles(view.schemes)[scheme]
    main = [(where.positions[s.label], e) for s in trunk(view) if (e := error_of(view, s, scheme))]
    if main:
        x = [position for position, _ in main]
        y = [100 * e.estimate for _, e in main]
        every = -(-len(main) // MANY)
        axes.plot(x, y, ls=line, marker=marker, markevery=every, ms=4, lw=1.5, color=colour)
        low, high = [bound(e.low) for _, e in main], [bound(e.high) for _, e in main]
        axes.fill_between(x, low, high, color=colour, alpha=0.16, lw=0)
    for subject in view.checkpoints:
        if subject not in trunk(view) and (error := error_of(view, subject, scheme)):
            _point(axes, where.positions[subject.label], error, marker, colour)
    last = main[-1][1].estimate * 100 if main else None
    for k, subject in enumerate(view.soups):
        if error := error_of(view, subject, scheme):
            _point(axes, soup_position(where, k, len(view.soups)), error, "*", colour)
            last = 100 * error.estimate
    return last


def _point(axes: Axes, x: float, error: Interval, marker: str, colour: str) -> None:
    """Draw one error with its interval: a filled star for a soup, a hollow mark for the others."""
    star = marker == "*"
    axes.plot([x, x], [bound(error.low), bound(error.high)], "-", lw=1, color=colour, alpha=0.6)
    axes.plot(
        [x], [100 * error.estimate], marker, color=colour, mew=1,
        ms=10 if star else 4, mfc=colour if star else GROUND,
    )  # fmt: skip


def _scale(axes: Axes, view: View) -> None:
    """Take a logarithmic scale where errors are positive and lie far apart."""
    errors = [
        100 * e.estimate
        for subject in view.subjects
        for scheme in view.schemes
        if (e := error_of(view, subject, scheme))
    ]
    scale = error_scale(errors)
    if scale.kind == "linear":
        axes.axhline(0, color=FAINT, lw=0.8, zorder=0)
    elif scale.kind == "log":
        axes.set_yscale("log")
        axes.set_ylim(min(errors) / 1.8, max(errors) * 1.8)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_yscale("symlog", linthresh=scale.straight)
        axes.set_yticks(mixed_ticks(scale.straight, min(errors), max(errors)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.axhline(0, color=FAINT, lw=0.8, zorder=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(axis="y", color=FAINT, alpha=0.25, lw=0.6)


def _marks(axes: Axes, where: Axis) -> None:
    """Mark where stages end."""
    for end in sorted(where.stage_ends.values())[:-1]:
        axes.axvline(end, color=FAINT, lw=0.9, ls=(0, (4, 3)), zorder=0)


def _name_stages(axes: Axes, view: View, where: Axis) -> None:
    """Write the stages' names above them, and the soup's above its star."""
    begin, names = min(where.positions.values()), []
    for stage, end in sorted(where.stage_ends.items(), key=lambda pair: pair[1]):
        if len(where.stage_ends) > 1:
            names.append((stage, (begin + end) / 2))
        begin = end
    if view.soups:
        middle = sum(soup_position(where, k, len(view.soups)) for k in range(len(view.soups)))
        label = view.soups[0].label if len(view.soups) == 1 else "soups"
        names.append((label, middle / len(view.soups)))
    _in_a_row(
        [
            axes.annotate(
                name(text, 14), (x, 1.015), xycoords=("data", "axes fraction"),
                ha="center", va="bottom", color=INK, fontsize=8.5,
            )
            for text, x in names
        ],
        axes,
    )  # fmt: skip


def _name_phases(axes: Axes, view: View, where: Axis) -> None:
    """Write beneath what the learning rate does."""
    _in_a_row(
        [
            axes.annotate(
                phase.name, ((phase.begin + phase.end) / 2, 0.16),
                xycoords=("data", "axes fraction"), ha="center", va="center", color=FAINT,
                fontsize=8,
            )
            for phase in phases(view, where)
        ],
        axes,
    )  # fmt: skip


def _in_a_row(texts: list[Annotation], axes: Axes) -> None:
    """Leave out a name that would run into the one before it, or out of the picture."""
    axes.figure.canvas.draw()
    right, edge = -math.inf, axes.figure.bbox.x1
    for text in sorted(texts, key=lambda text: text.get_window_extent().x0):
        box = text.get_window_extent()
        text.set_visible(box.x0 > right + 4 and box.x0 >= 0 and box.x1 <= edge)
        right = box.x1 if text.get_visible() else right


def _name_ends(axes: Axes, view: View, ends: dict[str, float]) -> None:
    """Write each scheme's name at the end of its line, pushed apart where they would overlap."""
    if not ends:
        return
    axes.figure.canvas.draw()
    heights = {s: axes.transAxes.inverted().transform(axes.transData.transform((0, y)))[1]
               for s, y in ends.items()}  # fmt: skip
    gap = LINE_INCHES / (axes.get_window_extent().height / axes.figure.dpi)
    placed = inside(spread_out(heights, gap), gap / 2)
    for scheme, height in placed.items():
        colour, _, _ = styles(view.schemes)[scheme]
        axes.annotate(
            name(scheme), (1.0, heights[scheme]), (1.035, height), xycoords="axes fraction",
            textcoords="axes fraction", va="center", color=colour, fontweight="bold",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.7, "alpha": 0.7},
        )  # fmt: skip


def _learning_rate(axes: Axes, view: View, where: Axis) -> None:
    points = [(where.positions[s.label], s.first.learning_rate or 0.0) for s in trunk(view)]
    axes.plot(*zip(*points, strict=True), "-", marker=".", color=INK, lw=1.2)
    peak = max(rate for _, rate in points)
    if peak > 0:
        axes.set_yticks([0, peak], ["0", f"{peak:.2g}"])
        axes.set_ylim(-0.12 * peak, 1.15 * peak)
    axes.set_ylabel("learning\nrate")
    axes.grid(axis="y", color=FAINT, alpha=0.25, lw=0.6)
