"""Which scale errors along a series deserve, and where its ticks stand. No matplotlib.

Errors of 3 and of 8 bits lie a factor of a thousand apart, and some are negative: a scale that is
straight near zero and logarithmic beyond shows both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FAR = 20
"""Errors of which the largest is so many times the smallest do not share a straight scale."""


@dataclass(frozen=True)
class ErrorScale:
    """What kind of scale, and for the mixed one up to which error it is straight."""

    kind: Literal["linear", "log", "symlog"]
    straight: float = 0.0


def error_scale(errors: Sequence[float]) -> ErrorScale:
    """Choose a logarithmic scale where errors are positive and lie far apart."""
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
    """Return ticks of a scale that is straight up to a value: its half shows that it is."""
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
