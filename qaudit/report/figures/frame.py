"""Scales from numbers to pixels with their ticks, axes, and names at the ends of lines.

Errors of 3 and of 8 bits are a factor of a thousand apart, and some are negative: a scale that is
linear near zero and logarithmic beyond shows both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from qaudit.report.figures.drawing import Label, Mark, Part, Path, band, line
from qaudit.report.figures.style import Look
from qaudit.types import Interval

NAME_HEIGHT = 16.0
FAR = 20
"""Values whose largest is so many times the smallest get a logarithmic scale."""


@dataclass(frozen=True)
class Scale:
    """A map from numbers to pixels; `forward` makes the numbers linear."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...] = ()
    forward: Callable[[float], float] = float

    def at(self, value: float) -> float:
        """Return the pixel of a number, or the nearer edge where it is out of range."""
        low, high = self.forward(self.low), self.forward(self.high)
        straight = self.forward(min(max(value, self.low), self.high))
        share = (straight - low) / (high - low) if high > low else 0.5
        return self.begin + share * (self.end - self.begin)


def mixed(straight: float) -> Callable[[float], float]:
    """Return a map that is linear up to a number and logarithmic beyond."""

    def forward(value: float) -> float:
        if abs(value) <= straight:
            return value / straight
        return math.copysign(1 + math.log10(abs(value) / straight), value)

    return forward


def widened(values: Sequence[float], by: float = 0.05) -> tuple[float, float]:
    """Return the range of the finite numbers with some room at both ends."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = by * (high - low) or abs(high) * by or 1.0
    return low - room, high + room


def linear(values: Sequence[float], begin: float, end: float, about: int = 5) -> Scale:
    """Return a linear scale that holds numbers, with round ticks."""
    low, high = widened(values)
    return Scale(low, high, begin, end, tuple(linear_ticks(low, high, about)))


def linear_or_log(values: Sequence[float], begin: float, end: float) -> Scale:
    """Return a logarithmic scale where numbers are positive and far apart, else a linear one."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if not (low > 0 and high > FAR * low):
        return linear(finite, begin, end)
    low, high = low / 1.3, high * 1.3
    return Scale(low, high, begin, end, tuple(log_ticks(low, high)), math.log10)


@dataclass(frozen=True)
class ErrorScale:
    """The kind of scale for errors, and up to which error the mixed one is linear."""

    kind: Literal["linear", "log", "symlog"]
    straight: float = 0.0


def error_scale(errors: Sequence[float]) -> ErrorScale:
    """Choose a logarithmic scale where errors are positive and far apart."""
    positive = [e for e in errors if e > 0]
    if not positive or max(positive) < FAR * min(positive):
        return ErrorScale("linear")
    if len(positive) == len(errors):
        return ErrorScale("log")
    quarter = sorted(map(abs, errors))[len(errors) // 4]
    return ErrorScale("symlog", round_down(max(1e-3, quarter)))


def round_down(value: float) -> float:
    """Return the largest 1, 2 or 5 of a decade that is not above a value."""
    decade = 10.0 ** math.floor(math.log10(value))
    steps = (step * decade for step in (1, 2, 5) if step * decade <= value)
    return max(steps, default=decade)  # the logarithm may round up to the next decade


def mixed_ticks(straight: float, lowest: float, highest: float) -> list[float]:
    """Return the ticks of a scale that is linear up to a value; half the value is one."""
    up = [straight / 2, straight]
    while up[-1] * 2 <= max(highest, -lowest):
        up.append(round_down(up[-1] * 2.5000001))
    return [*(-tick for tick in up if -tick >= lowest), 0.0, *(t for t in up if t <= highest)]


def log_ticks(lowest: float, highest: float) -> list[float]:
    """Return 1, 2 and 5 of every decade between two positive numbers; of many decades, 1 alone."""
    first, last = math.floor(math.log10(lowest)), math.floor(math.log10(highest))
    steps = (1, 2, 5) if last - first < 5 else (1,)
    every = [step * 10.0**decade for decade in range(first, last + 1) for step in steps]
    return [tick for tick in every if lowest <= tick <= highest]


def linear_ticks(lowest: float, highest: float, about: int = 5) -> list[float]:
    """Return round numbers between two others, at most about so many of them."""
    if not lowest < highest:
        return [lowest]
    wanted = (highest - lowest) / about
    decade = 10.0 ** math.floor(math.log10(wanted))
    step = next(k * decade for k in (1, 2, 5, 10, 20) if k * decade >= 0.999 * wanted)
    first, last = math.ceil(lowest / step - 1e-9), math.floor(highest / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def axis_left(
    scale: Scale, left: float, right: float, show: Callable[[float], str] = "{:g}".format
) -> list[Part]:
    parts: list[Part] = []
    for tick in scale.ticks:
        y = scale.at(tick)
        parts.append(line(left, y, right, y, "zero" if tick == 0 else "grid"))
        parts.append(Label(show(tick), left - 7, y + 4, "end"))
    return parts


def lines_up(scale: Scale, top: float, bottom: float) -> list[Part]:
    places = ((scale.at(tick), "zero" if tick == 0 else "grid") for tick in scale.ticks)
    return [line(x, top, x, bottom, kind) for x, kind in places]


def axis_below(
    scale: Scale, y: float, show: Callable[[float], str] = "{:g}".format, name: str = ""
) -> list[Part]:
    """Return a line with numbers beneath it, and its name beneath them."""
    parts: list[Part] = [line(scale.begin, y, scale.end, y, "axis")]
    for tick in scale.ticks:
        parts.append(line(scale.at(tick), y, scale.at(tick), y + 4, "axis"))
        parts.append(Label(show(tick), scale.at(tick), y + 17, "middle"))
    if name:
        parts.append(Label(name, (scale.begin + scale.end) / 2, y + 34, "middle"))
    return parts


def curve(points: Sequence[tuple[float, Interval]], up: Scale, look: Look) -> list[Part]:
    """Return a line through estimates and the band of their intervals."""
    ends = [(x, *bounds(interval)) for x, interval in points]
    middle = tuple((x, up.at(interval.estimate)) for x, interval in points)
    return [
        band([(x, up.at(b)) for x, _, b in ends], [(x, up.at(a)) for x, a, _ in ends], look.colour),
        Path(middle, look.stroke),
    ]


def whisker(x: float, interval: Interval, up: Scale, colour: str) -> Path:
    low, high = bounds(interval)
    return line(x, up.at(low), x, up.at(high), f"whisker {colour}")


def bounds(interval: Interval) -> tuple[float, float]:
    """Return the bounds of an interval; one that is not a number is infinite."""
    low, high = interval.low, interval.high
    return -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high


def mark(
    shape: str,
    x: float,
    y: float,
    colour: str,
    tip: Sequence[str] = (),
    *,
    filled: bool = True,
    quiet: bool = False,
) -> Mark:
    """Return a mark; a quiet one appears only when it is pointed at."""
    kind = "mark" + " hollow" * (not filled) + " quiet" * quiet + f" {colour}"
    return Mark(shape, x, y, kind, tuple(filter(None, tip)))


def at_ends(
    heights: Mapping[str, float], top: float, bottom: float, at_most: float = math.inf
) -> dict[str, float]:
    """Return heights for names at which they do not overlap, inside a panel where they fit.

    Names are `NAME_HEIGHT` apart, in the order of their wanted heights, and the lowest of them is
    not below `at_most` (a line that they would cover) if there is room above.
    """
    placed = spread_out(heights, NAME_HEIGHT)
    if not placed:
        return {}
    half = NAME_HEIGHT / 2
    shift = max(0.0, top + half - min(placed.values()))
    shift = shift or min(0.0, min(bottom - half, at_most) - max(placed.values()))
    if min(placed.values()) + shift < top + half:
        shift = top + half - min(placed.values())
    return {name: y + shift for name, y in placed.items()}


def spread_out(heights: Mapping[str, float], gap: float) -> dict[str, float]:
    """Move heights apart until neighbours differ by a gap, and keep their order and middle."""
    blocks: list[tuple[float, list[str]]] = []
    for name in sorted(heights, key=heights.__getitem__):
        middle, names = heights[name], [name]
        while blocks and middle - gap * (len(names) - 1) / 2 < (
            blocks[-1][0] + gap * (len(blocks[-1][1]) + 1) / 2
        ):
            names = blocks.pop()[1] + names
            middle = sum(heights[n] for n in names) / len(names)
        blocks.append((middle, names))
    return {
        name: middle + gap * (k - (len(names) - 1) / 2)
        for middle, names in blocks
        for k, name in enumerate(names)
    }
