"""Bits per weight against the loss of the best subject under each scheme: low and left is good.

Intervals are left out: the points share their documents, so that bars around each would suggest
that none differ. The paired differences are in the card.
"""

from __future__ import annotations

import math
from itertools import pairwise

from qaudit.report.figures import frame
from qaudit.report.figures.drawing import WIDTH, Drawing, Label, Part, Path, Series, line
from qaudit.report.figures.frame import Scale, linear_ticks, widened
from qaudit.report.figures.style import Look, fitted, looks, name
from qaudit.report.format import spread
from qaudit.report.pick import Point, clusters, points
from qaudit.report.views import View

LEFT, RIGHT, TOP = 64.0, 840.0, 30.0
TICKS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)


def pareto(view: View, alt: str) -> Drawing:
    """Draw every scheme's best subject, and the front that nothing with fewer bits beats."""
    shown = [p for p in points(view) if p.bits_per_weight > 0 and math.isfinite(p.ce.estimate)]
    tallest = max((len(cluster) for cluster in clusters(shown)), default=0)
    bottom = TOP + max(300.0, 2 * frame.NAME_HEIGHT * (tallest + 1))
    bits = [p.bits_per_weight for p in shown] or [1.0]
    low, high = min(bits) / 1.12, max(bits) * 1.6  # names are at the right of their marks
    ticks = tuple(float(tick) for tick in TICKS if low <= tick <= max(bits) * 1.12)
    across = Scale(low, high, LEFT, RIGHT, ticks, math.log)
    losses = widened([p.ce.estimate for p in shown], 0.1)
    up = Scale(*losses, bottom, TOP, tuple(linear_ticks(*losses)))
    parts: list[Part] = [
        *frame.axis_left(up, LEFT, RIGHT),
        *frame.axis_below(across, bottom, name="bits per weight"),
        Label("loss of the best subject, nats per token", 0, 12, "faint"),
        _front([p for p in shown if p.on_front], across, up),
    ]
    subjects = {p.subject for p in shown}
    names = {
        p.scheme: p.scheme if len(subjects) == 1 else f"{p.scheme}: {p.subject}" for p in shown
    }
    for cluster in clusters(shown):
        parts += _cluster(cluster, across, up, looks(view.schemes), names)
    note = "Filled, and joined by the line: nothing with fewer bits is better."
    if len(subjects) == 1:
        note += f" The best subject is {name(shown[0].subject)} everywhere."
    return Drawing(
        "pareto",
        "What fewer bits cost, each scheme at its best subject",
        alt,
        (Series("0", tuple(parts)),),
        bottom + 42,
        note,
    )


def _front(front: list[Point], across: Scale, up: Scale) -> Path:
    """Join the front by steps: between two schemes nothing is gained."""
    placed = [(across.at(p.bits_per_weight), up.at(p.ce.estimate)) for p in front]
    corners = [((x, before), (x, y)) for (_, before), (x, y) in pairwise(placed)]
    return Path((*placed[:1], *(point for corner in corners for point in corner)), "front")


def _cluster(
    cluster: list[Point],
    across: Scale,
    up: Scale,
    look: dict[str, Look],
    names: dict[str, str],
) -> list[Part]:
    """Draw points of nearly equal bits, with their names at the right, above the front's line."""
    heights = {p.scheme: up.at(p.ce.estimate) for p in cluster}
    front = [heights[p.scheme] for p in cluster if p.on_front]
    above = max(front) - 0.7 * frame.NAME_HEIGHT if front else math.inf
    placed = frame.at_ends(heights, up.end, up.begin, above)
    right = max(across.at(p.bits_per_weight) for p in cluster) + 22
    lines: list[Part] = []
    marks: list[Part] = []
    for point in cluster:
        own = look.get(point.scheme, Look("ink", "o"))
        x, y = across.at(point.bits_per_weight), heights[point.scheme]
        tip = [
            f"{point.scheme}: {point.bits_per_weight:.2f} bits per weight",
            point.subject,
            f"loss {spread(point.ce)} nats per token",
        ]
        words = fitted(names[point.scheme], min(240.0, WIDTH - right))
        lines.append(line(x + 5, y, right - 4, placed[point.scheme], "leader"))
        lines.append(Label(words, right, placed[point.scheme] + 4))
        marks.append(frame.mark(own.marker, x, y, own.colour, tip, filled=point.on_front))
    return [*lines, *marks]
