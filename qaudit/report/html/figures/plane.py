"""The loss on the way to the quantized model, and the slice that the checkpoint before spans.

The slice is a grid of squares, coloured the stronger the higher the loss lies among them; each
says its number.
"""

from __future__ import annotations

import math

from qaudit.report.elements import EMPTY, Html, element, joined
from qaudit.report.html.figures import frame
from qaudit.report.html.figures.frame import Scale
from qaudit.report.looks import INK, LINES, METHOD_COLOURS, name
from qaudit.report.scales import linear_ticks
from qaudit.report.views import View
from qaudit.saved.curvature import Line, grid, interval_text, shown_lines
from qaudit.types import PlaneRow

LEFT, WIDE, TOP, TALL = 66.0, 330.0, 36.0, 300.0
GRID_LEFT, GRID_WIDE = 500.0, 340.0
MARKERS = ("o", "s", "^", "D")


def plane(view: View, description: str) -> Html:
    """Draw the lines, and beside them the grid where there is one."""
    lines, points = shown_lines(view), grid(view)
    wide = WIDE if points else 2 * WIDE
    parts = [_lines(lines, wide)]
    parts += [_grid(points)] if points else []
    entries = [
        frame.swatch(METHOD_COLOURS[k % 5], MARKERS[k % 4], name(line.subject, 40), LINES[k % 4])
        for k, line in enumerate(lines)
    ]
    title = "The loss on the way to the quantized model"
    said = frame.note("Bands: intervals. Squares: the stronger the colour, the higher the loss.")
    beside = (said if points else EMPTY, frame.legend(entries))
    return frame.figure("plane", title, description, joined(parts), TOP + TALL + 44, *beside)


def _lines(lines: list[Line], wide: float) -> Html:
    """Draw the change of the loss on the way, a line for each subject."""
    places = [b for line in lines for b, _ in line.points]
    changes = [change for line in lines for _, change in line.points]
    ends = [x for c in changes for x in (c.low, c.estimate, c.high) if math.isfinite(x)]
    across = Scale(*frame.widened(places), LEFT, LEFT + wide, (0.0, 0.5, 1.0))
    low, high = frame.widened([0.0, *ends])
    up = Scale(low, high, TOP + TALL, TOP, tuple(linear_ticks(low, high, 6)))
    words = {0.0: "as it is", 0.5: "halfway", 1.0: name(lines[0].scheme, 14)}
    parts = [frame.axis_left(up, LEFT, LEFT + wide, lambda tick: f"{tick:g}")]
    parts += [frame.axis_below(across, TOP + TALL, lambda tick: words[tick])]
    parts += [frame.label("change of the loss, nats per token", 0, TOP - 20, "faint")]
    parts += [_line(line, k, across, up) for k, line in enumerate(lines)]
    return joined(parts)


def _line(line: Line, k: int, across: Scale, up: Scale) -> Html:
    shade, shape = METHOD_COLOURS[k % 5], MARKERS[k % 4]
    known = [(b, change) for b, change in line.points if math.isfinite(change.estimate)]
    high = [(across.at(b), up.at(c.high if math.isfinite(c.high) else math.inf)) for b, c in known]
    low = [(across.at(b), up.at(c.low if math.isfinite(c.low) else -math.inf)) for b, c in known]
    middle = [(across.at(b), up.at(c.estimate)) for b, c in known]
    parts = [frame.path([*high, *reversed(low)], f"band {frame.colour(shade)}", closed=True)]
    parts += [frame.path(middle, f"line {frame.stroke(shade, LINES[k % 4])}")]
    for (b, change), (x, y) in zip(known, middle, strict=True):
        where = f"{b:g} of the way to {line.scheme}"
        tip = [line.subject, where, f"{interval_text(change)} nats per token"]
        parts += [frame.mark(shape, x, y, shade, tip)]
    return element("g", *parts, class_="series", data_series=k)


def _grid(points: list[PlaneRow]) -> Html:
    """Draw a square for every point; up is towards the checkpoint before."""
    a_values, b_values = (sorted({getattr(p, side) for p in points}) for side in ("a", "b"))
    order = sorted({p.ce.estimate for p in points})
    wide, tall = GRID_WIDE / len(b_values), TALL / len(a_values)
    parts = [
        frame.label(f"Loss around {name(points[0].subject, 28)}", GRID_LEFT, TOP - 12, "strong")
    ]
    marks = []
    for p in points:
        x = GRID_LEFT + b_values.index(p.b) * wide
        y = TOP + (len(a_values) - 1 - a_values.index(p.a)) * tall
        share = order.index(p.ce.estimate) / max(1, len(order) - 1)
        parts += [
            element(
                "rect", x=x, y=y, width=wide, height=tall, class_="square",
                fill_opacity=0.06 + 0.8 * share,
            )
        ]  # fmt: skip
        shape = {(0.0, 0.0): "o", (0.0, 1.0): "s", (1.0, 0.0): "^"}.get((p.a, p.b))
        middle = x + wide / 2, y + tall / 2
        quiet = shape is None  # a square alone, which still answers
        marks += [frame.mark(shape or "o", *middle, INK, _tip(p), filled=False, quiet=quiet)]
    bottom = TOP + TALL
    said = "towards the quantized model (square)"
    parts += [frame.label(said, GRID_LEFT + GRID_WIDE / 2, bottom + 18, "middle")]
    up = "up: towards the checkpoint before (triangle)"
    parts += [frame.label(up, GRID_LEFT + GRID_WIDE / 2, bottom + 36, "middle")]
    return element("g", *parts, *marks, class_="series", data_series="grid")


def _tip(p: PlaneRow) -> list[str]:
    return [
        p.subject,
        f"{p.b:g} towards {p.scheme}, {p.a:g} towards {p.previous}",
        f"loss {p.ce.estimate:.4g}, {interval_text(p.absolute_change)} from the middle",
    ]
