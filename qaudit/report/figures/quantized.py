"""Quantized against full-precision loss, a panel for each scheme: low and left is good."""

from __future__ import annotations

import math

from qaudit.report.figures import frame
from qaudit.report.figures.drawing import Drawing, Label, Mark, Part, Series, Swatch, line
from qaudit.report.figures.frame import Scale, linear_ticks, widened
from qaudit.report.figures.style import look_of, name
from qaudit.report.format import loss, percent
from qaudit.report.views import View
from qaudit.types import Subject

COLUMNS = 4
PANEL, STEP_X, STEP_Y = 156.0, 208.0, 226.0
LEFT, TOP = 50.0, 24.0
REACH = 1.15
"""Subjects with more than this times the best loss are left out."""


def quantized(view: View, alt: str) -> Drawing:
    shown = _contenders(view)
    across = widened([s.ce.estimate for x in shown if (s := view.score(x.label))])
    losses = _losses(view, shown, view.schemes)
    # One scale for all panels, unless it would squeeze some of them.
    shared = losses if losses and max(losses) < 1.4 * min(losses) else None
    panels = []
    for k, scheme in enumerate(view.schemes):
        up = widened(shared or _losses(view, shown, (scheme,)))
        left, top = LEFT + STEP_X * (k % COLUMNS), TOP + STEP_Y * (k // COLUMNS)
        x = Scale(*across, left, left + PANEL, tuple(linear_ticks(*across, 3)))
        y = Scale(*up, top + PANEL, top, tuple(linear_ticks(*up, 4)))
        panels.append(Series(str(k), tuple(_panel(view, scheme, shown, x, y))))
    rows = -(-len(view.schemes) // COLUMNS)
    note = "Across: in full precision. Ring: the lowest loss of a panel. "
    note += "Dashed line: quantization costs nothing."
    if left_out := len(view.subjects) - len(shown):
        note += f" {left_out} of {len(view.subjects)} are left out: their loss is over "
        note += f"{100 * (REACH - 1):.0f} % above the best."
    named = [(k, stage) for k, stage in enumerate(_stages(view)) if stage is not None]
    legend = [
        Swatch(name(stage, 16), look_of(k).marker, f"mark {look_of(k).colour}")
        for k, stage in named
    ]
    legend += [Swatch("soup", "*", "mark ink")] if view.soups else []
    title = "Quantized loss against full-precision loss, nats per token"
    height = TOP + STEP_Y * rows - 20
    return Drawing("quantized", title, alt, tuple(panels), height, note, tuple(legend))


def _losses(view: View, shown: tuple[Subject, ...], schemes: tuple[str, ...]) -> list[float]:
    scores = [view.score(s.label, scheme) for s in shown for scheme in schemes]
    return [s.ce.estimate for s in scores if s is not None and math.isfinite(s.ce.estimate)]


def _panel(view: View, scheme: str, shown: tuple[Subject, ...], x: Scale, y: Scale) -> list[Part]:
    parts = frame.axis_left(y, x.begin, x.end)
    parts += frame.axis_below(x, y.begin)
    parts += [Label(name(scheme, 20), x.begin, y.end - 8, "strong")]
    low, high = max(x.low, y.low), min(x.high, y.high)
    if low < high:
        parts += [line(x.at(low), y.at(low), x.at(high), y.at(high), "stage")]
    best = view.best(scheme)
    for subject in shown:
        if (mark := _mark(view, scheme, subject, x, y)) is not None:
            parts += [Mark("ring", mark.x, mark.y, "ring")] if subject.label == best else []
            parts += [mark]
    return parts


def _mark(view: View, scheme: str, subject: Subject, x: Scale, y: Scale) -> Mark | None:
    full, score = view.score(subject.label), view.score(subject.label, scheme)
    if full is None or score is None or score.relative_error is None:
        return None
    if not math.isfinite(full.ce.estimate) or not math.isfinite(score.ce.estimate):
        return None
    shape, colour = "*", "ink"
    if subject.kind == "checkpoint":
        look = look_of(_stages(view).index(subject.first.stage))
        shape, colour = look.marker, look.colour
    tip = [
        subject.label,
        f"{scheme}: loss {loss(score.ce)}, in full precision {loss(full.ce)}",
        f"{percent(score.relative_error, unit=' %')} more",
    ]
    return frame.mark(shape, x.at(full.ce.estimate), y.at(score.ce.estimate), colour, tip)


def _stages(view: View) -> list[str | None]:
    stages = dict.fromkeys(s.first.stage for s in view.checkpoints)
    return sorted(stages, key=lambda stage: stage is None)


def _contenders(view: View) -> tuple[Subject, ...]:
    """Leave out subjects so far from the best that they would squeeze all others together."""
    scores = [(s, score) for s in view.subjects if (score := view.score(s.label))]
    best = min((score.ce.estimate for _, score in scores), default=0.0)
    return tuple(s for s, score in scores if score.ce.estimate <= REACH * best)
