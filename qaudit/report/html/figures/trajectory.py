"""Relative error along the series, with the learning rate beneath it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qaudit.report.elements import EMPTY, Html, element, joined
from qaudit.report.format import count, percent, printable
from qaudit.report.html.figures import frame
from qaudit.report.html.figures.frame import Scale
from qaudit.report.html.figures.phased import explained, strips
from qaudit.report.looks import FAINT, bound, name, styles
from qaudit.report.scales import error_scale, linear_ticks, log_ticks, mixed_ticks
from qaudit.report.series import (
    Axis,
    axis,
    error_of,
    inside,
    key,
    knows_rates,
    phases,
    soup_position,
    spread_out,
    trunk,
)
from qaudit.report.views import View
from qaudit.types import Interval, Subject

LEFT, RIGHT, TOP = 58.0, 700.0, 26.0
NAME_HEIGHT = 16.0
RATE_HEIGHT = 62.0
MANY = 40  # marks of one line at most that are seen at once


def trajectory(view: View, description: str) -> Html:
    """Draw relative error along the series, and the learning rate where it is known."""
    where, rates = axis(view), knows_rates(view)
    tall = max(320.0, NAME_HEIGHT * len(view.schemes))
    bottom = TOP + tall
    floor = bottom + 34 + RATE_HEIGHT if rates else bottom
    along = _along(view, where)
    up = _errors(view, bottom)
    parts = [_phases(view, where, along, floor)]
    parts += [frame.axis_left(up, LEFT, RIGHT, lambda tick: f"{tick:g}")]
    parts += [_stages(view, where, along, floor), strips(view, where, along, TOP, bottom)]
    parts += [frame.label("relative error of the loss, %", 0, 12, "faint")]
    ends = {scheme: _end(view, scheme, up) for scheme in view.schemes}
    names = _names({s: y for s, y in ends.items() if y is not None}, bottom)
    parts += [
        _series(view, where, scheme, along, up, names.get(scheme, EMPTY)) for scheme in view.schemes
    ]
    parts += [_rates(view, where, along, floor)] if rates else []
    parts += [frame.axis_below(along, floor, lambda tick: count(round(tick)), where.name)]
    looks = styles(view.schemes)
    entries = [
        frame.swatch(looks[s][0], looks[s][2], s, looks[s][1], data_series=k)
        for k, s in enumerate(view.schemes)
    ]
    said = "; ".join([key(view), *explained(view, where)])
    title = "What quantization adds to the loss, along the series"
    beside = (frame.note(f"{said[:1].upper()}{said[1:]}."), frame.legend(entries))
    return frame.figure("trajectory", title, description, joined(parts), floor + 42, *beside)


def _along(view: View, where: Axis) -> Scale:
    """Place checkpoints, and soups after them."""
    places = list(where.positions.values())
    ticks = tuple(linear_ticks(min(places), max(places), 6))
    places += [soup_position(where, k, len(view.soups)) for k in range(len(view.soups))]
    low, high = frame.widened(places, 0.015)
    return Scale(low, high, LEFT, RIGHT, ticks)


def _errors(view: View, bottom: float) -> Scale:
    """Choose the scale of errors as the picture does; intervals may reach its edges."""
    found = [
        e for s in view.subjects for scheme in view.schemes if (e := error_of(view, s, scheme))
    ]
    errors = [100 * e.estimate for e in found if math.isfinite(e.estimate)] or [0.0]
    scale = error_scale(errors)
    if scale.kind == "log":
        low, high = min(errors) / 1.8, max(errors) * 1.8
        return Scale(low, high, bottom, TOP, tuple(log_ticks(low, high)), math.log10)
    reached = [100 * x for e in found for x in (e.low, e.high) if math.isfinite(x)]
    if scale.kind == "linear":
        low, high = frame.widened([0.0, *errors, *reached])
        return Scale(low, high, bottom, TOP, tuple(linear_ticks(low, high, 6)))
    low, high = min(errors), max(errors)
    ticks = tuple(mixed_ticks(scale.straight, low, high))
    return Scale(1.3 * min(low, 0), 1.5 * high, bottom, TOP, ticks, frame.mixed(scale.straight))


def _series(
    view: View, where: Axis, scheme: str, along: Scale, up: Scale, named: Html
) -> Html:  # fmt: skip
    """Draw one scheme: its band and line along the trunk, marks with tips for every subject."""
    shade, dashes, shape = styles(view.schemes)[scheme]
    main = [
        (along.at(where.positions[s.label]), e)
        for s in trunk(view)
        if (e := error_of(view, s, scheme)) and math.isfinite(e.estimate)
    ]
    middle = [(x, up.at(100 * e.estimate)) for x, e in main]
    low = [(x, up.at(_within(e.low, -math.inf))) for x, e in main]
    high = [(x, up.at(_within(e.high, math.inf))) for x, e in main]
    parts = [frame.path([*high, *reversed(low)], f"band {frame.colour(shade)}", closed=True)]
    parts += [frame.path(middle, f"line {frame.stroke(shade, dashes)}")]
    on_trunk = {s.label: k for k, s in enumerate(trunk(view))}
    every = -(-len(on_trunk) // MANY)
    placed = [(s, where.positions[s.label]) for s in view.checkpoints]
    placed += [(s, soup_position(where, k, len(view.soups))) for k, s in enumerate(view.soups)]
    for subject, position in placed:
        error = error_of(view, subject, scheme)
        if error is None or not math.isfinite(error.estimate):
            continue
        x, soup = along.at(position), subject.kind == "soup"
        if subject.label not in on_trunk:
            parts += [_whisker(x, error, up, f"whisker {frame.colour(shade)}")]
        parts += [
            frame.mark(
                "*" if soup else shape, x, up.at(100 * error.estimate), shade,
                _tip(subject, scheme, error), filled=soup or subject.label in on_trunk,
                quiet=on_trunk.get(subject.label, 0) % every > 0,
            )
        ]  # fmt: skip
    k = view.schemes.index(scheme)
    return element("g", *parts, named, class_="series", data_series=k)


def _within(bound_: float, otherwise: float) -> float:
    """Return a bound in percent; one that is no number reaches the edge."""
    return 100 * bound_ if math.isfinite(bound_) else otherwise


def _whisker(x: float, error: Interval, up: Scale, kind: str) -> Html:
    low, high = _within(error.low, -math.inf), _within(error.high, math.inf)
    return frame.line(x, up.at(low), x, up.at(high), kind)


def _tip(subject: Subject, scheme: str, error: Interval) -> Sequence[str]:
    """Say what a mark is: subject, error, and where in training."""
    first = subject.first
    known = [
        f"step {first.step:,}" if first.step is not None else "",
        f"{count(first.tokens)} tokens" if first.tokens is not None else "",
        f"learning rate {first.learning_rate:.3g}" if first.learning_rate is not None else "",
    ]
    if subject.kind == "soup":
        known = [f"a soup of {len(subject.members)} checkpoints"]
    said = f"{scheme}: {percent(error, unit=' %')}"
    return [printable(subject.label), said, ", ".join(filter(None, known))]


def _end(view: View, scheme: str, up: Scale) -> float | None:
    """Return the height at which a scheme's name is wanted: at its soup, or its last checkpoint."""
    for subject in [*reversed(view.soups), *reversed(trunk(view))]:
        error = error_of(view, subject, scheme)
        if error is not None and not math.isnan(bound(error.estimate)):
            return up.at(100 * error.estimate)
    return None


def _names(ends: dict[str, float], bottom: float) -> dict[str, Html]:
    """Write names beside the ends of their lines, apart from each other."""
    tall = bottom - TOP
    shares = {scheme: (bottom - y) / tall for scheme, y in ends.items()}
    gap = NAME_HEIGHT / tall
    placed = inside(spread_out(shares, gap), gap / 2)
    return {
        scheme: joined(
            [
                frame.line(RIGHT + 4, ends[scheme], RIGHT + 20, bottom - share * tall, "leader"),
                frame.label(name(scheme, 20), RIGHT + 24, bottom - share * tall + 4, "strong"),
            ]
        )
        for scheme, share in placed.items()
    }


def _stages(view: View, where: Axis, along: Scale, floor: float) -> Html:
    """Mark where stages end, and name them above, where there is room."""
    ends = sorted(where.stage_ends.items(), key=lambda pair: pair[1])
    parts = [
        frame.line(along.at(x), TOP, along.at(x), floor, "stage") for _, x in ends[:-1]
    ]  # fmt: skip
    begin, right = min(where.positions.values()), 210.0  # the axis is named before
    for stage, end in ends if len(ends) > 1 else []:
        middle = along.at((begin + end) / 2)
        words = name(stage, 16)
        if middle - 3.5 * len(words) > right:
            parts += [frame.label(words, middle, 18, "middle")]
            right = middle + 3.5 * len(words) + 8
        begin = end
    return joined(parts)


def _phases(view: View, where: Axis, along: Scale, floor: float) -> Html:
    """Shade where the learning rate falls."""
    return joined(
        element(
            "rect", x=along.at(phase.begin), y=TOP, height=floor - TOP, class_="falls",
            width=along.at(phase.end) - along.at(phase.begin),
        )
        for phase in phases(view, where)
        if phase.name == "falls"
    )  # fmt: skip


def _rates(view: View, where: Axis, along: Scale, floor: float) -> Html:
    """Draw the learning rate along the trunk, and say beneath what it does."""
    rates = [(where.positions[s.label], s.first.learning_rate or 0.0) for s in trunk(view)]
    peak = max(rate for _, rate in rates)
    up = Scale(0.0, peak or 1.0, floor - 6, floor - RATE_HEIGHT, (0.0, peak) if peak else (0.0,))
    points = [(along.at(x), up.at(rate)) for x, rate in rates]
    parts = [frame.axis_left(up, LEFT, RIGHT, lambda tick: f"{tick:.2g}")]
    parts += [frame.label("learning rate", 0, floor - RATE_HEIGHT - 12, "faint")]
    parts += [frame.path(points, "line ink d0")]
    parts += [frame.mark("o", x, y, FAINT) for x, y in points] if len(points) <= 40 else []
    right = -math.inf
    for phase in phases(view, where):
        middle = along.at((phase.begin + phase.end) / 2)
        if middle - 20 > right:
            parts += [frame.label(phase.name, middle, floor - 12, "middle faint")]
            right = middle + 20
    return element("g", *parts, class_="rates")
