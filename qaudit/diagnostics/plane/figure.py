"""The loss on the way to the quantized model, and the slice that the checkpoint before spans.

The slice is a grid of squares, the stronger in colour the higher their loss among them.
"""

from __future__ import annotations

import math

from qaudit.diagnostics.plane.section import Line, grid, lines, shown_lines
from qaudit.report.figures import frame
from qaudit.report.figures.drawing import Box, Drawing, Label, Part, Series, Swatch
from qaudit.report.figures.frame import Scale, linear, widened
from qaudit.report.figures.style import look_of, name
from qaudit.report.format import interval_text
from qaudit.report.views import View
from qaudit.types import PlaneRow

LEFT, WIDE, TOP, TALL = 66.0, 330.0, 36.0, 300.0
GRID_LEFT, GRID_WIDE = 500.0, 340.0


NAME = "plane"
ALT = "The loss on the way to the quantized model"


def is_drawn(view: View) -> bool:
    return bool(lines(view))


def draw(view: View, alt: str) -> Drawing:
    shown, points = shown_lines(view), grid(view)
    parts = _lines(shown, WIDE if points else 2 * WIDE)
    parts += [Series("grid", tuple(_grid(points)))] if points else []
    note = "Bands: intervals. Squares: the stronger the colour, the higher the loss."
    looks = [look_of(k) for k in range(len(shown))]
    return Drawing(
        NAME,
        ALT,
        alt,
        tuple(parts),
        TOP + TALL + 44,
        note if points else "Bands: intervals.",
        tuple(
            Swatch(name(one.subject, 40), look.marker, f"mark {look.colour}", look.stroke, str(k))
            for k, (one, look) in enumerate(zip(shown, looks, strict=True))
        ),
    )


def _lines(lines: list[Line], wide: float) -> list[Part]:
    places = [b for line in lines for b, _ in line.points]
    changes = [x for line in lines for _, c in line.points for x in (c.low, c.estimate, c.high)]
    across = Scale(*widened(places), LEFT, LEFT + wide, (0.0, 0.5, 1.0))
    up = linear([0.0, *changes], TOP + TALL, TOP, 6)
    words = {0.0: "as it is", 0.5: "halfway", 1.0: name(lines[0].scheme, 14)}
    parts = frame.axis_left(up, LEFT, LEFT + wide)
    parts += frame.axis_below(across, TOP + TALL, words.__getitem__)
    parts += [Label("change of the loss, nats per token", 0, TOP - 20, "faint")]
    parts += [Series(str(k), tuple(_line(line, k, across, up))) for k, line in enumerate(lines)]
    return parts


def _line(line: Line, k: int, across: Scale, up: Scale) -> list[Part]:
    look = look_of(k)
    finite = [(b, change) for b, change in line.points if math.isfinite(change.estimate)]
    parts = frame.curve([(across.at(b), change) for b, change in finite], up, look)
    for b, change in finite:
        where = f"{b:g} of the way to {line.scheme}"
        tip = [line.subject, where, f"{interval_text(change)} nats per token"]
        parts += [frame.mark(look.marker, across.at(b), up.at(change.estimate), look.colour, tip)]
    return parts


def _grid(points: list[PlaneRow]) -> list[Part]:
    """Draw a square for every point; up is towards the checkpoint before."""
    a_values, b_values = (sorted({getattr(p, side) for p in points}) for side in ("a", "b"))
    order = sorted({p.ce.estimate for p in points})
    wide, tall = GRID_WIDE / len(b_values), TALL / len(a_values)
    middle, bottom = GRID_LEFT + GRID_WIDE / 2, TOP + TALL
    parts: list[Part] = [
        Label(f"Loss around {name(points[0].subject, 28)}", GRID_LEFT, TOP - 12, "strong"),
        Label("towards the quantized model (square)", middle, bottom + 18, "middle"),
        Label("up: towards the checkpoint before (triangle)", middle, bottom + 36, "middle"),
    ]
    marks: list[Part] = []
    for p in points:
        x = GRID_LEFT + b_values.index(p.b) * wide
        y = TOP + (len(a_values) - 1 - a_values.index(p.a)) * tall
        share = order.index(p.ce.estimate) / max(1, len(order) - 1)
        parts += [Box(x, y, wide, tall, "square", 0.06 + 0.8 * share)]
        shape = {(0.0, 0.0): "o", (0.0, 1.0): "s", (1.0, 0.0): "^"}.get((p.a, p.b))
        marks += [
            frame.mark(
                shape or "o", x + wide / 2, y + tall / 2, "ink", _tip(p), filled=False,
                quiet=shape is None,
            )
        ]  # fmt: skip
    return [*parts, *marks]


def _tip(p: PlaneRow) -> list[str]:
    return [
        p.subject,
        f"{p.b:g} towards {p.scheme}, {p.a:g} towards {p.previous}",
        f"loss {p.ce.estimate:.4g}, {interval_text(p.absolute_change)} from the middle",
    ]
