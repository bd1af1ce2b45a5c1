"""Numbers, sizes and names as people read them, the same on every surface."""

from __future__ import annotations

import math
import re

from qaudit.core.sizes import size as size  # the one place where sizes are printed
from qaudit.types import Interval

NOT_MEASURED = "-"
NO_CHANGE = "0"
NOT_FINITE = "not finite"


def percent(found: Interval, *, bounds: bool = True, unit: str = "") -> str:
    """Print a fraction in percent: `0.92 [0.71, 1.13]`, `0` where nothing changed at all."""
    return spread(_times(found, 100), bounds=bounds, unit=unit)


def spread(found: Interval, *, bounds: bool = True, unit: str = "") -> str:
    """Print an interval with the digits that its width deserves."""
    if not math.isfinite(found.estimate):
        return NOT_FINITE
    if found.estimate == found.low == found.high == 0:
        return NO_CHANGE + unit
    digits = _digits(found)
    text = _number(found.estimate, digits) + unit
    return (
        f"{text} [{_number(found.low, digits)}, {_number(found.high, digits)}]" if bounds else text
    )


def points(part: float) -> str:
    """Print a fraction in percentage points, with two digits that say something."""
    if not 0 < part < math.inf:
        return NO_CHANGE if part == 0 else NOT_FINITE
    if 100 * part < 1e-5:
        return "< 0.00001"
    return f"{100 * part:.{max(0, min(6, 1 - math.floor(math.log10(100 * part))))}f}"


def loss(found: Interval) -> str:
    """Print a loss on its own: differences, which are paired, are finer than its interval."""
    return f"{found.estimate:.3f}" if math.isfinite(found.estimate) else NOT_FINITE


def _times(found: Interval, factor: float) -> Interval:
    return Interval(factor * found.estimate, factor * found.low, factor * found.high)


def _digits(found: Interval) -> int:
    """Two significant digits of the half-width, between 1 and 5 decimals."""
    half = (found.high - found.low) / 2
    if not math.isfinite(half) or half <= 0:
        return 3
    return min(5, max(1, 1 - math.floor(math.log10(half))))


def _number(value: float, digits: int) -> str:
    if math.isinf(value):
        return "-inf" if value < 0 else "inf"
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def count(number: int) -> str:
    """Print a large number in short."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.2f}".rstrip("0").rstrip(".") + unit
    return f"{number:,}"


def duration(seconds: float) -> str:
    """Print a time."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 3 * 86400 else f"{seconds / 86400:.0f} days"


def plural(number: int, noun: str) -> str:
    """Print `1 document`, `2 documents`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listing(names: list[str]) -> str:
    """Print `a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def inert(text: str) -> str:
    """Keep lines of a text from being workflow commands, which start with `::` on a runner."""
    return re.sub(r"(?m)^(\s*):(?=:)", r"\1?", text)


def printable(text: str) -> str:
    """Replace control characters, so that no name moves a cursor or ends a line."""
    return "".join(character if character.isprintable() else "?" for character in text)
