"""Bits per weight against the loss of the best subject under each scheme: low and left is good.

Intervals are left out: the points share their documents, so that bars around each would seem to
say that nothing can be told apart. The paired differences are in the card.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qaudit.report.pareto import Point, clusters, points
from qaudit.report.plots.style import FAINT, GROUND, INK, name, new_figure, styles
from qaudit.report.series import inside, spread_out
from qaudit.report.views import View

TICKS = (2, 3, 4, 5, 6, 8, 12, 16, 32)
LINE_INCHES = 0.185  # of a name


def pareto(view: View) -> Figure:
    """Draw every scheme's best subject, and the front that nothing with fewer bits beats."""
    shown = points(view)
    tallest = max(map(len, clusters(shown)), default=0)
    figure = new_figure(8.5, max(4.6, 0.25 * tallest + 1.6))
    axes = figure.subplots()
    axes.set_xscale("log")
    front = [point for point in shown if point.on_front]
    axes.plot(
        [p.bits_per_weight for p in front], [p.ce.estimate for p in front],
        "-", color=FAINT, lw=1.1, drawstyle="steps-post", zorder=0,
    )  # fmt: skip
    looks = styles(view.schemes)
    for point in shown:
        colour, _, marker = looks.get(point.scheme, (INK, "-", "o"))
        fill = colour if point.on_front else "none"
        x, y = point.bits_per_weight, point.ce.estimate
        axes.plot(x, y, marker, ms=6.5, color=colour, mfc=fill, mew=1.4)
    _scale(axes, shown)
    for cluster in clusters(shown):
        _name(axes, cluster, {scheme: colour for scheme, (colour, _, _) in looks.items()})
    axes.set_xlabel("bits per weight")
    axes.set_ylabel("loss of the best subject, nats per token")
    axes.set_title("What fewer bits cost, each scheme at its best subject", loc="left", pad=24)
    axes.annotate(
        "filled: nothing with fewer bits is better", (0, 1), (0, 9), xycoords="axes fraction",
        textcoords="offset points", color=FAINT, fontsize=8,
    )  # fmt: skip
    axes.grid(axis="y", color=FAINT, alpha=0.25, lw=0.6)
    return figure


def _scale(axes: Axes, shown: tuple[Point, ...]) -> None:
    lowest, highest = (pick(p.bits_per_weight for p in shown) for pick in (min, max))
    axes.set_xlim(lowest / 1.12, highest * 1.75)  # names stand to the right of their marks
    axes.margins(y=0.12)
    ticks = [tick for tick in TICKS if lowest / 1.12 <= tick <= highest * 1.12]
    axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
    axes.set_xticks([], minor=True)


def _name(axes: Axes, cluster: list[Point], colours: dict[str, str]) -> None:
    """Write scheme and subject beside each mark, pushed apart where names would overlap."""
    axes.figure.canvas.draw()
    place = axes.transAxes.inverted()
    where = {
        p.scheme: place.transform(axes.transData.transform((p.bits_per_weight, p.ce.estimate)))
        for p in cluster
    }
    right = max(float(xy[0]) for xy in where.values()) + 0.03
    gap = LINE_INCHES / (axes.get_window_extent().height / axes.figure.dpi)
    wanted = {scheme: float(xy[1]) for scheme, xy in where.items()}
    heights = inside(spread_out(wanted, gap), gap / 2)
    for point in cluster:
        colour = colours.get(point.scheme, INK)
        axes.annotate(
            f"{name(point.scheme)}: {name(point.subject)}", tuple(where[point.scheme]),
            (right, heights[point.scheme]), xycoords="axes fraction", va="center", color=colour,
            textcoords="axes fraction", fontsize=8, annotation_clip=False,
            bbox={"facecolor": GROUND, "edgecolor": "none", "pad": 0.8},
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "alpha": 0.6, "shrinkB": 4},
        )  # fmt: skip
