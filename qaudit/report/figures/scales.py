"""Scales from numbers to pixels, and their ticks.

Errors of 3 and of 8 bits are a factor of a thousand apart, and some are negative: a scale that is
linear near zero and logarithmic beyond shows both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

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
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    room = by * (high - low) or abs(high) * by or 1.0
    return low - room, high + room


def linear(values: Sequence[float], begin: float, end: float, about: int = 5) -> Scale:
    """Return a linear scale that holds numbers, with round ticks."""
    low, high = widened(values)
    return Scale(low, high, begin, end, tuple(linear_ticks(low, high, about)))


def linear_or_log(values: Sequence[float], begin: float, end: float) -> Scale:
    """Return a logarithmic scale where numbers are positive and far apart, else a linear one."""
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    if not (low > 0 and high > FAR * low):
        return linear(known, begin, end)
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
