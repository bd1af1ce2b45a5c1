"""Bits per weight against the loss of the best subject under each scheme: low and left is good."""

from __future__ import annotations

import math

from qaudit.report.elements import EMPTY, Html, element, joined
from qaudit.report.format import loss, spread
from qaudit.report.html.figures import frame
from qaudit.report.html.figures.frame import Scale
from qaudit.report.looks import INK, Line, name, styles
from qaudit.report.pareto import Point, clusters, points
from qaudit.report.scales import linear_ticks
from qaudit.report.series import inside, spread_out
from qaudit.report.views import View

LEFT, RIGHT, TOP = 64.0, 840.0, 30.0
NAME_HEIGHT = 16.0
Looks = dict[str, tuple[str, Line, str]]
TICKS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)


def pareto(view: View, description: str) -> Html:
    """Draw every scheme's best subject, and the front that nothing with fewer bits beats."""
    shown = [p for p in points(view) if p.bits_per_weight > 0 and math.isfinite(p.ce.estimate)]
    if not shown:
        return EMPTY
    tallest = max(len(cluster) for cluster in clusters(shown))
    bottom = TOP + max(300.0, NAME_HEIGHT * (tallest + 1))
    bits = [p.bits_per_weight for p in shown]
    low, high = min(bits) / 1.12, max(bits) * 1.6  # names stand to the right of their marks
    ticks = tuple(float(tick) for tick in TICKS if low <= tick <= max(bits) * 1.12)
    across = Scale(low, high, LEFT, RIGHT, ticks, math.log)
    losses = frame.widened([p.ce.estimate for p in shown], 0.1)
    up = Scale(*losses, bottom, TOP, tuple(linear_ticks(*losses)))
    parts = [frame.axis_left(up, LEFT, RIGHT, lambda tick: f"{tick:g}")]
    parts += [frame.axis_below(across, bottom, lambda tick: f"{tick:g}", "bits per weight")]
    parts += [frame.label("loss of the best subject, nats per token", 0, 12, "faint")]
    parts += [_front([p for p in shown if p.on_front], across, up)]
    looks = styles(view.schemes)
    for cluster in clusters(shown):
        parts += [_cluster(cluster, across, up, looks)]
    title = "What fewer bits cost, each scheme at its best subject"
    note = frame.note("Filled: nothing with fewer bits is better.")
    drawing = element("g", *parts, class_="series", data_series=0)
    return frame.figure("pareto", title, description, drawing, bottom + 42, note)


def _front(front: list[Point], across: Scale, up: Scale) -> Html:
    """Join the front by steps: between two schemes nothing is gained."""
    steps: list[tuple[float, float]] = []
    for point in front:
        x, y = across.at(point.bits_per_weight), up.at(point.ce.estimate)
        steps += [(x, steps[-1][1]), (x, y)] if steps else [(x, y)]
    return frame.path(steps, "front")


def _cluster(cluster: list[Point], across: Scale, up: Scale, looks: Looks) -> Html:
    """Draw points of nearly equal bits, with their names pushed apart at their right."""
    tall = up.begin - up.end
    shares = {p.scheme: (up.begin - up.at(p.ce.estimate)) / tall for p in cluster}
    gap = NAME_HEIGHT / tall
    heights = inside(spread_out(shares, gap), gap / 2)
    right = max(across.at(p.bits_per_weight) for p in cluster) + 22
    parts = []
    for point in cluster:
        shade, _, shape = looks.get(point.scheme, (INK, "-", "o"))
        x, y = across.at(point.bits_per_weight), up.at(point.ce.estimate)
        beside = up.begin - heights[point.scheme] * tall
        tip = [
            f"{point.scheme}: {point.bits_per_weight:.2f} bits per weight",
            point.subject,
            f"loss {spread(point.ce)} nats per token",
        ]
        parts += [frame.line(x + 5, y, right - 4, beside, "leader")]
        parts += [frame.mark(shape, x, y, shade, tip, filled=point.on_front)]
        parts += [frame.label(f"{name(point.scheme, 20)}, {loss(point.ce)}", right, beside + 4)]
    return joined(parts)
