"""Parameters of `plane`: the points of a slice through a checkpoint.

A point is theta + a * v + b * u: v leads from the checkpoint to the one before it, u to what a
scheme makes of it, so that (0, 0), (1, 0) and (0, 1) are the three models themselves. Neither
direction is scaled: a slice shows what these moves cost, not how wide a valley is.

Slices in the section `How sharp the loss is`: a sentence each, and the figure.

The loss of the quantized model is compared with the parabola through the subject and the points
beside it: above that, quantization leaves the region that the curvature describes.

The loss on the way to the quantized model, and the slice that the checkpoint before spans.

The slice is a grid of squares, the stronger in colour the higher their loss among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import (
    Diagnostic,
    DiagnosticFigure,
    DiagnosticWork,
    at_least,
    with_three_bits,
)
from qaudit.errors import UsageError
from qaudit.report import document as doc
from qaudit.report.chart import COLOURS, INK, Chart, look_of, name_of
from qaudit.report.format import digits, interval_text
from qaudit.report.series import picture
from qaudit.report.views import View
from qaudit.settings import EXAMPLE_SCHEME
from qaudit.types import Interval, PlaneRow


@dataclass(frozen=True, kw_only=True)
class Plane(Diagnostic):
    """The loss from a checkpoint to its quantized self and beyond, and to the one before it."""

    name: ClassVar[str] = "plane"
    reads_previous: ClassVar[bool] = True

    grid: bool = False  # towards the checkpoint before, too
    steps: int = at_least(1, 4)  # from one of the models to the next
    beyond: int = at_least(0, 2)  # steps on either side of them
    documents: int = at_least(2, 64)
    scheme: str = "auto"  # the first of the recipe with 3 bits, or else the first

    @property
    def along(self) -> tuple[float, ...]:
        """Return the places of points along a direction; 0 and 1 are among them."""
        return tuple(k / self.steps for k in range(-self.beyond, self.steps + self.beyond + 1))

    def schemes(self, schemes: Sequence[Scheme]) -> Sequence[Scheme]:
        return [self.scheme_among(schemes)]

    def work(self, schemes: Sequence[Scheme], blocks: int) -> DiagnosticWork:
        scheme, along = self.scheme_among(schemes), len(self.along)
        across = f"{along} passes of them, towards the checkpoint before"
        return DiagnosticWork(
            f"plane at {scheme.short}: {along} streams more for each subject, in float32; "
            + (across if self.grid else "one pass"),
            streams=along,
            passes=along if self.grid else 1,
            documents=self.documents,
            schemes=(scheme,),
        )

    def scheme_among(self, schemes: Sequence[Scheme]) -> Scheme:
        """Return the scheme whose weights the slice leads to."""
        if self.scheme != "auto":
            return parse_scheme(self.scheme)
        if not schemes:
            raise UsageError(
                "a slice leads to what a scheme makes of a model, and this audit has none",
                hint=f"name one, as `--set diagnostics=plane:scheme={EXAMPLE_SCHEME}`",
            )
        return with_three_bits(schemes) or schemes[0]


Line = list[tuple[float, Interval]]
"""The places of points from a subject on, along the direction of quantization, and by how much
the loss changes to each."""


def section(view: View) -> doc.Section:
    texts = [beyond_the_parabola(*heading, line) for heading, line in shown_lines(view).items()]
    blocks = (*(doc.paragraph(text) for text in texts if text), *picture(view, "plane"))
    return doc.Section("How sharp the loss is", blocks, 5)


def shown_lines(view: View) -> dict[tuple[str, str], Line]:
    """Return the lines of the end of a stage, the last checkpoint and the pick, with schemes."""
    rows = sorted((r for r in view.audit.diagnostics.plane if r.a == 0.0), key=lambda row: row.b)
    schemes = {row.subject: row.scheme for row in rows}
    pick = view.audit.pick.subject if view.audit.pick else None
    labels = [view.stage_end and view.stage_end.label, view.last and view.last.label, pick]
    shown = [label for label in dict.fromkeys(labels) if label in schemes]
    shown = shown or [s.label for s in view.subjects if s.label in schemes][:3]
    return {
        (label, schemes[label]): [(r.b, r.absolute_change) for r in rows if r.subject == label]
        for label in shown
    }


def beyond_the_parabola(subject: str, scheme: str, line: Line) -> str:
    """Hold the loss of the quantized model against the parabola through the subject."""
    changes = dict(line)
    if (quantized := changes.get(1.0)) is None:
        return ""
    text = f"From `{subject}` to its {scheme} version the loss rises by "
    text += f"{interval_text(quantized)} nats per token"
    step = min(b for b in changes if b > 0)
    if step >= 1 or -step not in changes:
        return f"{text}."
    after, before = changes[step].estimate, changes[-step].estimate
    slope, bend = (after - before) / (2 * step), (after + before) / step**2
    expected = slope + bend / 2
    relation = "more than" if expected < quantized.low else "as much as"
    relation = "less than" if expected > quantized.high else relation
    return f"{text}, {relation} the curvature at its start predicts ({digits(expected)})."


ALT = "The loss on the way to the quantized model"


def _draw(view: View) -> Chart:
    lines, rows = shown_lines(view), view.audit.diagnostics.plane
    order = {subject.label: k for k, subject in enumerate(view.subjects)}
    of_grid = [row for row in rows if row.previous is not None]
    last = max((row.subject for row in of_grid), key=lambda s: order.get(s, -1), default="")
    points = [row for row in of_grid if row.subject == last]
    note = "Bands: intervals."
    note += " Squares: the stronger the colour, the higher the loss." if points else ""
    chart = Chart(ALT, note, 3.3)
    axes, *beside = chart.figure.subplots(1, 1 + bool(points), squeeze=False)[0]
    axes.set_ylabel("change of the loss, nats per token")
    axes.set_xticks([0.0, 0.5, 1.0], ["as it is", "halfway", name_of(next(iter(lines))[1], 14)])
    for k, ((subject, scheme), line) in enumerate(lines.items()):
        chart.names[str(k)] = subject
        way = [
            (b, at, f"{subject}\n{b:g} of the way to {scheme}\n{interval_text(at)} nats per token")
            for b, at in line
            if math.isfinite(at.estimate)
        ]
        chart.curve(axes, str(k), way, **look_of(k))
    chart.legend({subject: look_of(k) for k, (subject, _) in enumerate(lines)})
    for axes in beside:
        _draw_grid(chart, axes, points)
    return chart


MODELS = {(0.0, 0.0): "o", (0.0, 1.0): "s", (1.0, 0.0): "^"}
"""The marks of the three models of a slice."""


def _draw_grid(chart: Chart, axes: Any, points: list[PlaneRow]) -> None:
    """Draw a square for every point; up is towards the checkpoint before."""
    axes.set_title(f"Loss around {name_of(points[0].subject, 28)}")
    across, upwards = (sorted({getattr(p, side) for p in points}) for side in ("b", "a"))
    order = sorted({p.ce.estimate for p in points})
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("towards the quantized model (square)\nup: the checkpoint before (triangle)")
    for p in points:
        x, y = across.index(p.b), upwards.index(p.a)
        strength = 0.06 + 0.8 * order.index(p.ce.estimate) / max(1, len(order) - 1)
        axes.bar(x, 1, 1, y - 0.5, color=COLOURS[0], alpha=strength, lw=0)
        tip = f"{p.subject}\n{p.b:g} towards {p.scheme}, {p.a:g} towards {p.previous}\n"
        tip += f"loss {p.ce.estimate:.4g}, {interval_text(p.absolute_change)} from the middle"
        model = MODELS.get((p.a, p.b))
        look = {"marker": model or "o", "color": INK, "ms": 5 if model else 0.7}
        chart.marks(axes, "grid", [(x, y, tip)], filled=not model, **look)


FIGURE = DiagnosticFigure("plane", ALT, lambda view: bool(shown_lines(view)), _draw)
