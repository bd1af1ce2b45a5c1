"""Added loss along the series, with the learning rate beneath it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from qaudit.diagnostics.registry import parts as parts_of
from qaudit.report.figures import frame
from qaudit.report.figures.drawing import (
    WIDTH,
    Box,
    Drawing,
    Label,
    Part,
    Path,
    Series,
    Swatch,
    line,
)
from qaudit.report.figures.frame import (
    Scale,
    error_scale,
    linear,
    linear_ticks,
    log_ticks,
    mixed,
    mixed_ticks,
    widened,
)
from qaudit.report.figures.style import Look, fitted, looks, name
from qaudit.report.format import count, percent, pixels_of, printable
from qaudit.report.series import Axis, axis, knows_rates, phases, runs, soup_position, trunk
from qaudit.report.views import View
from qaudit.types import Interval, Subject

LEFT, RIGHT, TOP = 58.0, 700.0, 42.0
RATE_HEIGHT = 62.0
MANY = 40  # marks of one line that are visible at once


class Quantity(NamedTuple):
    """What is drawn along the series."""

    name: str
    title: str
    unit: str


LOSS = Quantity(
    "trajectory", "What quantization adds to the loss, along the series", "added loss, %"
)


def trajectory(view: View, alt: str, what: Quantity = LOSS) -> Drawing:
    where, rates = axis(view), knows_rates(view)
    bottom = TOP + max(320.0, frame.NAME_HEIGHT * len(view.schemes))
    floor = bottom + 34 + RATE_HEIGHT if rates else bottom
    along = _along(view, where)
    up, unit, straight = _errors(view, bottom, what.unit)
    shown = looks(view.schemes)
    overlays = tuple(parts_of("overlay")) if what is LOSS else ()
    parts: list[Part] = [
        *_falls(view, where, along, floor),
        *frame.axis_left(up, LEFT, RIGHT),
        *(_turn(up, straight) if straight else []),
        *_stages(view, where, along, floor),
        *(p for over in overlays for p in over.strips(view, where, along, TOP, bottom)),
        Label(unit, 0, 12, "faint"),
    ]
    parts += [_scheme(view, where, scheme, along, up) for scheme in view.schemes]
    parts += _names(view, up, bottom)
    parts += _rates(view, where, along, floor) if rates else []
    parts += frame.axis_below(along, floor, lambda tick: count(round(tick)), where.name)
    explained = [text for over in overlays for text in over.explained(view, where)]
    note = "; ".join([_key(view), *explained])
    return Drawing(
        what.name,
        what.title,
        alt,
        tuple(parts),
        floor + 42,
        f"{note[:1].upper()}{note[1:]}.",
        tuple(
            Swatch(name(s), look.marker, f"mark {look.colour}", look.stroke, str(k))
            for k, (s, look) in enumerate(shown.items())
        ),
    )


def _along(view: View, where: Axis) -> Scale:
    places = list(where.positions.values())
    ticks = tuple(linear_ticks(min(places), max(places), 6))
    places += [soup_position(where, k, len(view.soups)) for k in range(len(view.soups))]
    return Scale(*widened(places, 0.015), LEFT, RIGHT, ticks)


def _errors(view: View, bottom: float, unit: str) -> tuple[Scale, str, float]:
    """Return the scale of errors, which intervals may leave, its name, and where it is linear."""
    points = [
        e for s in view.subjects for scheme in view.schemes if (e := view.error(s.label, scheme))
    ]
    errors = [100 * e.estimate for e in points if math.isfinite(e.estimate)] or [0.0]
    low, high, chosen = min(errors), max(errors), error_scale(errors)
    if chosen.kind == "log":
        low, high = low / 1.8, high * 1.8
        scale = Scale(low, high, bottom, TOP, tuple(log_ticks(low, high)), math.log10)
        return scale, f"{unit} (logarithmic)", 0.0
    if chosen.kind == "linear":
        reached = [100 * x for e in points for x in (e.low, e.high) if math.isfinite(x)]
        return linear([0.0, *errors, *reached], bottom, TOP, 6), unit, 0.0
    straight = chosen.straight
    ticks = tuple(mixed_ticks(straight, low, high))
    scale = Scale(1.3 * min(low, 0), 1.5 * high, bottom, TOP, ticks, mixed(straight))
    return scale, f"{unit} (linear up to {straight:g} %, logarithmic beyond)", straight


def _turn(up: Scale, straight: float) -> Iterator[Part]:
    """Mark where a scale that is linear near zero turns logarithmic, on both sides of zero."""
    for turn in (straight, -straight):
        if up.low < turn < up.high:
            y = up.at(turn)
            yield line(LEFT, y, RIGHT, y, "stage")
    yield Label(f"linear below {straight:g} %", RIGHT - 4, up.at(straight) + 14, "end faint bare")


def _scheme(view: View, where: Axis, scheme: str, along: Scale, up: Scale) -> Series:
    look = looks(view.schemes)[scheme]
    main = {s.label: k for k, s in enumerate(trunk(view))}
    every = -(-len(main) // MANY)
    placed = [(s, where.positions[s.label]) for s in view.checkpoints]
    placed += [(s, soup_position(where, k, len(view.soups))) for k, s in enumerate(view.soups)]
    points = [
        (subject, along.at(x), Interval(100 * error.estimate, 100 * error.low, 100 * error.high))
        for subject, x in placed
        if (error := view.error(subject.label, scheme)) and math.isfinite(error.estimate)
    ]
    parts: list[Part] = []
    at = {subject.label: (x, error) for subject, x, error in points}
    for run in runs(view, where):
        if measured := [at[subject.label] for subject in run if subject.label in at]:
            parts += frame.curve(measured, up, look)
    parts += _siblings(view, {s.label: (x, up.at(e.estimate)) for s, x, e in points}, look)
    for subject, x, error in points:
        soup, on_main = subject.kind == "soup", subject.label in main
        if not on_main:
            parts.append(frame.whisker(x, error, up, look.colour))
        parts.append(
            frame.mark(
                "*" if soup else look.marker, x, up.at(error.estimate), look.colour,
                _tip(view, subject, scheme), filled=soup or on_main,
                quiet=main.get(subject.label, 0) % every > 0,
            )
        )  # fmt: skip
    return Series(str(view.schemes.index(scheme)), tuple(parts))


def _siblings(view: View, places: Mapping[str, tuple[float, float]], look: Look) -> list[Part]:
    """Draw a line for each other ingredient, from the checkpoint that it was trained on from."""
    lines: dict[tuple[str | None, int | None], list[tuple[float, float]]] = {}
    main = {subject.label for subject in trunk(view)}
    before: dict[str | None, tuple[float, float]] = {}  # of a stage, the last of the one before
    last: tuple[str | None, tuple[float, float]] | None = None
    for subject in view.checkpoints:
        if (at := places.get(subject.label)) is None:
            continue
        stage = subject.first.stage
        if last is not None and last[0] != stage:
            before.setdefault(stage, last[1])
        if subject.label in main:
            last = stage, at
        else:
            fork = [before[stage]] if stage in before else []
            lines.setdefault((stage, subject.first.ingredient), fork).append(at)
    return [Path(tuple(points), look.stroke) for points in lines.values() if len(points) > 1]


def _tip(view: View, subject: Subject, scheme: str) -> list[str]:
    first, error = subject.first, view.error(subject.label, scheme)
    facts = [
        f"step {first.step:,}" if first.step is not None else "",
        f"{count(first.tokens)} tokens" if first.tokens is not None else "",
        f"learning rate {first.learning_rate:.3g}" if first.learning_rate is not None else "",
    ]
    if subject.kind == "soup":
        facts = [f"a soup of {len(subject.members)} checkpoints"]
    measured = f"{scheme}: {percent(error, unit=' %')}" if error else ""
    return [printable(subject.label), measured, ", ".join(filter(None, facts))]


def _names(view: View, up: Scale, bottom: float) -> Iterator[Part]:
    ends: dict[str, float] = {}
    for scheme in view.schemes:
        for subject in [*reversed(view.soups), *reversed(trunk(view))]:
            error = view.error(subject.label, scheme)
            if error is not None and math.isfinite(error.estimate):
                ends[scheme] = up.at(100 * error.estimate)
                break
    for scheme, y in frame.at_ends(ends, TOP, bottom).items():
        yield line(RIGHT + 4, ends[scheme], RIGHT + 20, y, "leader")
        yield Label(fitted(scheme, 0.9 * (WIDTH - RIGHT - 24)), RIGHT + 24, y + 4, "strong")


def _stages(view: View, where: Axis, along: Scale, floor: float) -> Iterator[Part]:
    """Mark the ends of stages, and name stages and soups above where there is room."""
    ends = sorted(where.stage_ends.items(), key=lambda pair: pair[1])
    begin, names = min(where.positions.values()), []
    if len(ends) < 2 or len(runs(view, where)) > 1:  # runs side by side end at the same place
        ends = []
    for stage, end in ends:
        names.append((stage, along.at((begin + end) / 2)))
        begin = end
    for _, end in ends[:-1]:
        yield line(along.at(end), TOP, along.at(end), floor, "stage")
    if view.soups:
        places = [soup_position(where, k, len(view.soups)) for k in range(len(view.soups))]
        soup = view.soups[0].label if len(places) == 1 else "soups"
        names.append((soup, along.at(sum(places) / len(places))))
    yield from _in_a_row(names, TOP - 8)


def _in_a_row(names: list[tuple[str, float]], y: float, kind: str = "") -> list[Label]:
    """Return names side by side, without those that would overlap the one before."""
    labels, begin = [], LEFT
    for text, middle in names:
        half = pixels_of(short := name(text, 16)) / 2
        if middle - half > begin:
            labels.append(Label(short, middle, y, f"middle {kind}".strip()))
            begin = middle + half + 8
    return labels


def _falls(view: View, where: Axis, along: Scale, floor: float) -> list[Part]:
    return [
        Box(along.at(p.begin), TOP, along.at(p.end) - along.at(p.begin), floor - TOP, "falls")
        for p in phases(view, where)
        if p.name == "falls"
    ]


def _rates(view: View, where: Axis, along: Scale, floor: float) -> list[Part]:
    rates = [
        [(where.positions[s.label], s.first.learning_rate or 0.0) for s in run]
        for run in runs(view, where)
    ]
    peak = max(rate for run in rates for _, rate in run)
    up = Scale(0.0, peak or 1.0, floor - 6, floor - RATE_HEIGHT, (0.0, peak) if peak else (0.0,))
    lines = [tuple((along.at(x), up.at(rate)) for x, rate in run) for run in rates]
    points = [point for drawn in lines for point in drawn]
    parts = frame.axis_left(up, LEFT, RIGHT, "{:.2g}".format)
    parts += [Label("learning rate", 0, floor - RATE_HEIGHT - 12, "faint")]
    parts += [Path(drawn, "line ink") for drawn in lines]
    parts += [frame.mark("o", x, y, "faint") for x, y in points] if len(points) <= MANY else []
    named = [(p.name, along.at((p.begin + p.end) / 2)) for p in phases(view, where)]
    parts += _in_a_row(named, floor - 12, "faint bare")
    return parts


def _key(view: View) -> str:
    """Return the meaning of bands, hollow marks, stars and shades, as far as they occur."""
    level = f"{100 * view.audit.plan.recipe.confidence:g} %"
    words = [f"bands: {level} intervals over {view.unit}s"]
    if len(trunk(view)) < len(view.checkpoints):
        words.append("hollow, on lines of their own: other ingredients")
    if len(runs(view, axis(view))) > 1:
        words.append("a line for each run")
    if view.soups:
        words.append("star: soup" if len(view.soups) == 1 else "stars: soups")
    if any(phase.name == "falls" for phase in phases(view, axis(view))):
        words.append("shaded: the learning rate falls")
    return "; ".join(words)


_QUANTITY = Quantity(
    "accuracy",
    "What quantization costs of accuracy on tasks, along the series",
    "accuracy lost, % of what full precision gets wrong",
)


class _Accuracy(View):
    """An audit whose errors are drops of accuracy: of the mean over tasks, or the only task."""

    @cached_property
    def _drops(self) -> dict[tuple[str, str], Interval | None]:
        return {(row.subject, row.scheme): row.accuracy_drop for row in self.audit.tasks}

    @property
    def unit(self) -> str:
        return "item"

    def error(self, subject: str, scheme: str) -> Interval | None:
        return self._drops.get((subject, scheme))


def accuracy(view: View, alt: str) -> Drawing:
    return trajectory(_Accuracy(view.audit), alt, _QUANTITY)
