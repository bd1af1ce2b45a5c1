"""Numbers and intervals of any size, with the digits that their width deserves."""

from __future__ import annotations

import math

from qaudit.types import Interval


def interval_text(interval: Interval | None) -> str:
    """Print an interval with two digits of its half-width."""
    if interval is None:
        return "-"
    half = (interval.high - interval.low) / 2
    if not math.isfinite(half) or half <= 0:
        return digits(interval.estimate)
    places = 1 - math.floor(math.log10(half))
    low, middle, high = (
        f"{round(value, places):,.{max(0, places)}f}"
        for value in (interval.low, interval.estimate, interval.high)
    )
    return f"{middle} [{low}, {high}]"


def digits(value: float | None) -> str:
    """Print a number with three digits."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    places = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(0, places)}f}"
