"""Quantized against full-precision loss, a panel for each scheme: low and left is good."""

from __future__ import annotations

import math

from qaudit.report.elements import EMPTY, Html, element, joined, text
from qaudit.report.format import loss, percent
from qaudit.report.html.figures import frame
from qaudit.report.html.figures.frame import Scale
from qaudit.report.looks import INK, name, stage_look
from qaudit.report.scales import linear_ticks
from qaudit.report.series import REACH, alike, contenders, stages_of
from qaudit.report.views import View
from qaudit.types import Subject

COLUMNS = 4
PANEL, STEP_X, STEP_Y = 156.0, 208.0, 226.0
LEFT, TOP = 50.0, 24.0


def quantized(view: View, description: str) -> Html:
    """Draw, for each scheme, quantized against full-precision loss."""
    shown = contenders(view)
    full = [s.ce.estimate for x in shown if (s := view.score(x.label))]
    across = frame.widened(full)
    shared = _losses(view, shown, view.schemes) if alike(view, shown) else None
    panels = []
    for k, scheme in enumerate(view.schemes):
        up = frame.widened(shared or _losses(view, shown, (scheme,)))
        left, top = LEFT + STEP_X * (k % COLUMNS), TOP + STEP_Y * (k // COLUMNS)
        x = Scale(*across, left, left + PANEL, tuple(linear_ticks(*across, 3)))
        y = Scale(*up, top + PANEL, top, tuple(linear_ticks(*up, 4)))
        panels.append(_panel(view, scheme, shown, x, y))
    rows = -(-len(view.schemes) // COLUMNS)
    title = "Quantized loss against full-precision loss, nats per token"
    beside = [frame.legend(_legend(view))]
    if left_out := len(view.subjects) - len(shown):
        many = f"{left_out} of {len(view.subjects)} left out: over {100 * (REACH - 1):.0f} % more "
        beside.insert(0, frame.note(f"{many}loss than the best."))
    height = TOP + STEP_Y * rows - 20
    return frame.figure("quantized", title, description, joined(panels), height, *beside)


def _losses(view: View, shown: tuple[Subject, ...], schemes: tuple[str, ...]) -> list[float]:
    found = [view.score(s.label, scheme) for s in shown for scheme in schemes]
    return [s.ce.estimate for s in found if s is not None and math.isfinite(s.ce.estimate)]


def _panel(view: View, scheme: str, shown: tuple[Subject, ...], x: Scale, y: Scale) -> Html:
    parts = [frame.axis_left(y, x.begin, x.end, lambda tick: f"{tick:g}")]
    parts += [frame.axis_below(x, y.begin, lambda tick: f"{tick:g}")]
    parts += [frame.label(name(scheme), x.begin, y.end - 8, "strong")]
    low, high = max(x.low, y.low), min(x.high, y.high)
    if low < high:
        parts += [frame.line(x.at(low), y.at(low), x.at(high), y.at(high), "free")]
    best = view.best(scheme, tuple(s.label for s in view.subjects))
    parts += [_subject(view, scheme, s, x, y, is_best=s.label == best) for s in shown]
    return element("g", *parts, class_="series", data_series=view.schemes.index(scheme))


def _subject(
    view: View, scheme: str, subject: Subject, x: Scale, y: Scale, *, is_best: bool
) -> Html:
    full, found = view.score(subject.label), view.score(subject.label, scheme)
    if full is None or found is None or found.relative_error is None:
        return EMPTY
    if not math.isfinite(full.ce.estimate) or not math.isfinite(found.ce.estimate):
        return EMPTY
    shade, shape = INK, "*"
    if subject.kind == "checkpoint":
        shade, shape = stage_look(stages_of(view).index(subject.first.stage))
    tip = [
        subject.label,
        f"{scheme}: loss {loss(found.ce)}, in full precision {loss(full.ce)}",
        f"{percent(found.relative_error, unit=' %')} more",
    ]
    place = x.at(full.ce.estimate), y.at(found.ce.estimate)
    ring = element("circle", cx=place[0], cy=place[1], r=9, class_="ring") if is_best else EMPTY
    return joined([ring, frame.mark(shape, *place, shade, tip)])


def _legend(view: View) -> list[Html]:
    """Explain marks, star, ring and line."""
    named = [stage for stage in stages_of(view) if stage is not None]
    entries = [frame.swatch(*stage_look(k), name(stage, 16)) for k, stage in enumerate(named)]
    entries += [frame.swatch(INK, "*", "soup")] if view.soups else []
    said = "ring: lowest loss of the panel; dashes: quantization costs nothing"
    return [*entries, element("li", element("span", text(said), class_="key"))]
