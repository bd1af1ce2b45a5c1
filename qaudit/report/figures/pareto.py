"""Bits per weight against the loss of the best subject under each scheme: low and left is good.

Intervals are left out: the points share their documents, so that bars around each would suggest
that none differ. The paired differences are in the card.
"""

from __future__ import annotations

import math

from qaudit.report.figures import frame
from qaudit.report.figures.drawing import Drawing, Label, Part, Series
from qaudit.report.figures.frame import Scale, linear_ticks, widened
from qaudit.report.figures.spots import Spot, drawn, height_for
from qaudit.report.figures.style import Look, looks, name
from qaudit.report.format import spread
from qaudit.report.pick import Point, points
from qaudit.report.views import View

LEFT, RIGHT, TOP = 64.0, 840.0, 30.0
TICKS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)


def pareto(view: View, alt: str) -> Drawing:
    """Draw every scheme's best subject, and the front that nothing with fewer bits beats."""
    shown = [p for p in points(view) if p.bits_per_weight > 0 and math.isfinite(p.ce.estimate)]
    subjects, look = {p.subject for p in shown}, looks(view.schemes)
    spots = [_spot(p, look.get(p.scheme, Look("ink", "o")), len(subjects) > 1) for p in shown]
    bottom = TOP + height_for(spots)
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
        *drawn(spots, across, up),
    ]
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


def _spot(point: Point, look: Look, several: bool) -> Spot:
    tip = (
        f"{point.scheme}: {point.bits_per_weight:.2f} bits per weight",
        point.subject,
        f"loss {spread(point.ce)} nats per token",
    )
    named = f"{point.scheme}: {point.subject}" if several else point.scheme
    bits, loss = point.bits_per_weight, point.ce.estimate
    return Spot(named, bits, loss, point.on_front, look, tip)
