"""Trace and largest eigenvalue of the Hessian along the series, with their scatter."""

from __future__ import annotations

import math
from collections.abc import Callable

from qaudit.diagnostics.curvature.section import whole_models
from qaudit.report.figures import frame
from qaudit.report.figures.drawing import Drawing, Label, Part, Series, line
from qaudit.report.figures.frame import Scale, linear_or_log, linear_ticks, widened
from qaudit.report.figures.style import look_of
from qaudit.report.format import count, digits, interval_text
from qaudit.report.series import Axis, axis, soup_position, trunk
from qaudit.report.views import View
from qaudit.types import CurvatureRow, Interval

LEFT, RIGHT, TOP, TALL, GAP = 78.0, 800.0, 26.0, 170.0, 46.0


NAME = "curvature"
ALT = "Trace and largest eigenvalue of the Hessian along the series"


def is_drawn(view: View) -> bool:
    models = whole_models(view)
    return sum(subject.label in models for subject in view.checkpoints) > 1


def draw(view: View, alt: str) -> Drawing:
    models, where = whole_models(view), axis(view)
    soups = [s.label for s in view.soups if s.label in models]
    places = dict(where.positions)
    places |= {label: soup_position(where, k) for k, label in enumerate(soups)}
    places_measured = {label: places[label] for label in models if label in places}
    series = list(where.positions.values())
    ticks = tuple(linear_ticks(min(series), max(series), 6))
    along = Scale(*widened([*series, *places_measured.values()], 0.03), LEFT, RIGHT, ticks)
    panels = [("trace", _trace), ("largest eigenvalue", _largest)]
    shown = [(name, read) for name, read in panels if any(map(read, models.values()))]
    parts: list[Part] = [
        Series(str(k), tuple(_panel(view, where, along, models, places_measured, k, *panel)))
        for k, panel in enumerate(shown)
    ]
    bottom = TOP + len(shown) * (TALL + GAP) - GAP
    parts += frame.axis_below(along, bottom, lambda tick: count(round(tick)), where.name)
    note = "Bands and bars: intervals over probes and documents, of an eigenvalue its residual"
    note += "; hollow: other ingredients" + ("; star: soup." if soups else ".")
    title = "How sharp the loss is, along the series"
    return Drawing(NAME, title, alt, tuple(parts), bottom + 42, note)


def _trace(row: CurvatureRow) -> Interval | None:
    trace = row.trace_elsewhere or row.trace
    return trace if math.isfinite(trace.estimate) else None


def _largest(row: CurvatureRow) -> Interval | None:
    if not row.eigenvalues or not math.isfinite(row.eigenvalues[0]):
        return None
    value, residual = row.eigenvalues[0], row.residuals[0]
    return Interval(value, value - residual, value + residual)


def _panel(
    view: View,
    where: Axis,
    along: Scale,
    models: dict[str, CurvatureRow],
    places: dict[str, float],
    k: int,
    name: str,
    read: Callable[[CurvatureRow], Interval | None],
) -> list[Part]:
    top, look = TOP + k * (TALL + GAP), look_of(k)
    values = {label: value for label in places if (value := read(models[label])) is not None}
    ends = [x for v in values.values() for x in (v.low, v.estimate, v.high)]
    up = linear_or_log(ends, top + TALL, top)
    main = [s.label for s in trunk(view) if s.label in values]
    soups = {s.label for s in view.soups}
    parts = frame.axis_left(up, LEFT, RIGHT, "{:,g}".format)
    parts += [Label(name, 0, top - 12, "faint")]
    stages = sorted(where.stage_ends.values())[:-1]
    parts += [line(along.at(x), top, along.at(x), top + TALL, "stage") for x in stages]
    parts += frame.curve([(along.at(places[x]), values[x]) for x in main], up, look)
    for label, value in values.items():
        x, soup = along.at(places[label]), label in soups
        if label not in main:
            parts += [frame.whisker(x, value, up, look.colour)]
        text = interval_text(value) if read is _trace else digits(value.estimate)
        tip = [label, f"{name} {text}"]
        shape, filled = "*" if soup else "o", soup or label in main
        parts += [frame.mark(shape, x, up.at(value.estimate), look.colour, tip, filled=filled)]
    return parts
