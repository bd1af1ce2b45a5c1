"""Trace and largest eigenvalue of the Hessian along the series, with their scatter."""

from __future__ import annotations

import math
from collections.abc import Callable

from qaudit.report.elements import EMPTY, Html, element, joined
from qaudit.report.format import count
from qaudit.report.html.figures import frame
from qaudit.report.html.figures.frame import Scale
from qaudit.report.looks import METHOD_COLOURS
from qaudit.report.scales import FAR, linear_ticks, log_ticks
from qaudit.report.series import Axis, axis, soup_position, trunk
from qaudit.report.views import View
from qaudit.saved.curvature import digits, interval_text, whole_models
from qaudit.types import CurvatureRow, Interval

LEFT, RIGHT, TOP, TALL, GAP = 78.0, 800.0, 26.0, 170.0, 46.0


def curvature(view: View, description: str) -> Html:
    """Draw the trace above and the largest eigenvalue beneath, where there is one."""
    models, where = whole_models(view), axis(view)
    soups = [s.label for s in view.soups if s.label in models]
    places = dict(where.positions)
    places |= {label: soup_position(where, k) for k, label in enumerate(soups)}
    known = {label: places[label] for label in models if label in places}
    series = list(where.positions.values())
    low, high = frame.widened([*series, *known.values()], 0.03)
    ticks = tuple(linear_ticks(min(series), max(series), 6))
    along = Scale(low, high, LEFT, RIGHT, ticks)
    panels = [("trace", _trace), ("largest eigenvalue", _largest)]
    shown = [(name, read) for name, read in panels if any(map(read, models.values()))]
    parts = [_panel(view, where, along, models, known, k, *panel) for k, panel in enumerate(shown)]
    bottom = TOP + len(shown) * (TALL + GAP) - GAP
    parts += [frame.axis_below(along, bottom, lambda tick: count(round(tick)), where.name)]
    said = "Bands and bars: intervals over probes and documents, of an eigenvalue its residual"
    said += "; hollow: other ingredients" + ("; star: soup" if soups else "")
    note = frame.note(f"{said}.")
    title = "How sharp the loss is, along the series"
    return frame.figure("curvature", title, description, joined(parts), bottom + 42, note)


def _trace(row: CurvatureRow) -> Interval | None:
    found = row.trace_elsewhere or row.trace
    return found if math.isfinite(found.estimate) else None


def _largest(row: CurvatureRow) -> Interval | None:
    if not row.eigenvalues or not math.isfinite(row.eigenvalues[0]):
        return None
    value, residual = row.eigenvalues[0], row.residuals[0]
    return Interval(value, value - residual, value + residual)


def _panel(  # noqa: PLR0913 - a panel is placed by them
    view: View,
    where: Axis,
    along: Scale,
    models: dict[str, CurvatureRow],
    places: dict[str, float],
    k: int,
    name: str,
    read: Callable[[CurvatureRow], Interval | None],
) -> Html:
    top, shade = TOP + k * (TALL + GAP), METHOD_COLOURS[k]
    found = {x: value for x in places if (value := read(models[x])) is not None}
    up = _scale(list(found.values()), top)
    main = [s.label for s in trunk(view) if s.label in found]
    high = [(along.at(places[x]), up.at(_end(found[x].high, math.inf))) for x in main]
    low = [(along.at(places[x]), up.at(_end(found[x].low, -math.inf))) for x in main]
    middle = [(along.at(places[x]), up.at(found[x].estimate)) for x in main]
    parts = [frame.axis_left(up, LEFT, RIGHT, lambda tick: f"{tick:,g}")]
    parts += [frame.label(name, 0, top - 12, "faint")]
    ends = sorted(where.stage_ends.values())[:-1]
    parts += [frame.line(along.at(x), top, along.at(x), top + TALL, "stage") for x in ends]
    parts += [frame.path([*high, *reversed(low)], f"band {frame.colour(shade)}", closed=True)]
    parts += [frame.path(middle, f"line {frame.stroke(shade)}")]
    soups = {s.label for s in view.soups}
    for label, value in found.items():
        x, y, soup = along.at(places[label]), up.at(value.estimate), label in soups
        beside = label not in main
        ends_of = (up.at(_end(value.low, -math.inf)), up.at(_end(value.high, math.inf)))
        kind = f"whisker {frame.colour(shade)}"
        parts += [frame.line(x, ends_of[0], x, ends_of[1], kind) if beside else EMPTY]
        text = interval_text(value) if read is _trace else digits(value.estimate)
        tip = [label, f"{name} {text}"]
        parts += [frame.mark("*" if soup else "o", x, y, shade, tip, filled=soup or not beside)]
    return element("g", *parts, class_="series", data_series=k)


def _end(bound: float, otherwise: float) -> float:
    return bound if math.isfinite(bound) else otherwise


def _scale(found: list[Interval], top: float) -> Scale:
    """Take a logarithmic scale where values are positive and lie far apart."""
    values = [x for v in found for x in (v.low, v.estimate, v.high) if math.isfinite(x)]
    low, high = min(values), max(values)
    if low > 0 and high > FAR * low:
        low, high = low / 1.3, high * 1.3
        return Scale(low, high, top + TALL, top, tuple(log_ticks(low, high)), math.log10)
    low, high = frame.widened(values)
    return Scale(low, high, top + TALL, top, tuple(linear_ticks(low, high, 5)))
