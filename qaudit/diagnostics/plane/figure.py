"""The loss on the way to the quantized model, and the slice that the checkpoint before spans.

The slice is a grid of squares, the stronger in colour the higher their loss among them.
"""

from __future__ import annotations

import math

from qaudit.diagnostics.plane.section import grid, lines, shown_lines
from qaudit.report.chart import COLOURS, INK, POINT, Chart, look_of, name_of
from qaudit.report.format import interval_text
from qaudit.report.views import View
from qaudit.types import PlaneRow

NAME = "plane"
ALT = "The loss on the way to the quantized model"


def is_drawn(view: View) -> bool:
    return bool(lines(view))


def draw(view: View) -> Chart:
    drawn, points = shown_lines(view), grid(view)
    note = "Bands: intervals."
    note += " Squares: the stronger the colour, the higher the loss." if points else ""
    chart = Chart(ALT, note, 380)
    axes = chart.axes(66, 396 if points else 800, 50, 330, "change of the loss, nats per token")
    axes.spines["bottom"].set_visible(True)
    axes.set_xticks([0.0, 0.5, 1.0], ["as it is", "halfway", name_of(drawn[0].scheme, 14)])
    for k, line in enumerate(drawn):
        look, series = look_of(k), str(k)
        chart.names[series] = line.subject
        finite = [(b, change) for b, change in line.points if math.isfinite(change.estimate)]
        chart.curve(axes, series, finite, **look)
        marks = [
            (
                b,
                change.estimate,
                f"{line.subject}\n{b:g} of the way to {line.scheme}\n"
                f"{interval_text(change)} nats per token",
            )
            for b, change in finite
        ]
        chart.marks(axes, series, marks, **look)
    chart.legend([(name_of(line.subject), look_of(k)) for k, line in enumerate(drawn)])
    if points:
        _draw_grid(chart, points)
    return chart


def _draw_grid(chart: Chart, points: list[PlaneRow]) -> None:
    """Draw a square for every point; up is towards the checkpoint before."""
    from matplotlib.patches import Rectangle

    axes = chart.axes(500, 840, 50, 330, "")
    chart.text(500, chart.top + 38, f"Loss around {name_of(points[0].subject, 28)}")
    across, upwards = (sorted({getattr(p, side) for p in points}) for side in ("b", "a"))
    order = sorted({p.ce.estimate for p in points})
    axes.set_xlim(0, len(across))
    axes.set_ylim(0, len(upwards))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("towards the quantized model (square); up: the checkpoint before (triangle)")
    for p in points:
        x, y = across.index(p.b), upwards.index(p.a)
        strength = 0.06 + 0.8 * order.index(p.ce.estimate) / max(1, len(order) - 1)
        axes.add_patch(Rectangle((x, y), 1, 1, color=COLOURS[0], alpha=strength, lw=0))
        marker = {(0.0, 0.0): "o", (0.0, 1.0): "s", (1.0, 0.0): "^"}.get((p.a, p.b), "o")
        is_plain = (p.a, p.b) not in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0))
        tip = f"{p.subject}\n{p.b:g} towards {p.scheme}, {p.a:g} towards {p.previous}\n"
        tip += f"loss {p.ce.estimate:.4g}, {interval_text(p.absolute_change)} from the middle"
        look = {"marker": marker, "color": INK, "ms": (1 if is_plain else 7) * POINT}
        chart.marks(axes, "grid", [(x + 0.5, y + 0.5, tip)], filled=is_plain, **look)
