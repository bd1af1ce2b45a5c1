"""Numbers, sizes and names as people read them, and text cut and filled by its width.

Chinese, Japanese and Korean characters take two columns and combining marks none, so that the
number of characters says little. What a terminal makes of joined emoji cannot be known; each
character of them counts by itself.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import TypeVar

from qaudit.errors import UsageError
from qaudit.support.sizes import size as size  # the one place where sizes are printed
from qaudit.types import Interval

NOT_MEASURED = "-"
NO_CHANGE = "0"
NOT_FINITE = "not finite"
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
IN_ASCII = "_.:;=+*#"

Value = TypeVar("Value")


def renderer_of(form: str, formats: Mapping[str, Callable[[Value], str]]) -> Callable[[Value], str]:
    if form not in formats:
        raise UsageError(f"there is no format `{form}`", hint=f"one of {', '.join(formats)}")
    return formats[form]


def or_dash(value: Value | None, show: Callable[[Value], str]) -> str:
    """Print a value; `-` where it was not measured."""
    return NOT_MEASURED if value is None else show(value)


def percent(interval: Interval, *, bounds: bool = True, unit: str = "") -> str:
    """Print a fraction in percent: `0.92 [0.71, 1.13]`, `0` where nothing changed at all."""
    low, high = 100 * interval.low, 100 * interval.high
    return spread(Interval(100 * interval.estimate, low, high), bounds=bounds, unit=unit)


def spread(interval: Interval, *, bounds: bool = True, unit: str = "") -> str:
    """Print an interval with the digits that its width deserves."""
    if not math.isfinite(interval.estimate):
        return NOT_FINITE
    if interval.estimate == interval.low == interval.high == 0:
        return NO_CHANGE + unit
    half = (interval.high - interval.low) / 2
    digits = 3
    if math.isfinite(half) and half > 0:  # two significant ones of the half-width
        digits = min(5, max(1, 1 - math.floor(math.log10(half))))
    text = _number(interval.estimate, digits) + unit
    if not bounds:
        return text
    return f"{text} [{_number(interval.low, digits)}, {_number(interval.high, digits)}]"


def points(part: float) -> str:
    """Print a fraction in percentage points, with two digits that say something."""
    if not 0 < 100 * part < math.inf:
        return NO_CHANGE if part == 0 else NOT_FINITE
    if 100 * part < 1e-5:
        return "< 0.00001"
    return f"{100 * part:.{max(0, min(6, 1 - math.floor(math.log10(100 * part))))}f}"


def loss(interval: Interval) -> str:
    """Print a loss on its own: differences, which are paired, are finer than its interval."""
    return f"{interval.estimate:.3f}" if math.isfinite(interval.estimate) else NOT_FINITE


def _number(value: float, digits: int) -> str:
    if math.isinf(value):
        return "-inf" if value < 0 else "inf"
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def count(number: int) -> str:
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.2f}".rstrip("0").rstrip(".") + unit
    return f"{number:,}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 3 * 86400 else f"{seconds / 86400:.0f} days"


def plural(number: int, noun: str) -> str:
    """Print `1 document`, `2 documents`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listing(names: list[str], most: int | None = None) -> str:
    """Print `a`, `a and b`, `a, b and c`; `none` of an empty list; of too many, how many more."""
    if most is not None and len(names) > most:
        names = [*names[:most], f"{len(names) - most} more"]
    if len(names) < 2:
        return names[0] if names else "none"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def inert(text: str) -> str:
    """Keep lines of a text from being workflow commands, which start with `::` on a runner."""
    return re.sub(r"(?m)^(\s*):(?=:)", r"\1?", text)


def printable(text: str) -> str:
    """Replace control characters, so that no name moves a cursor or ends a line."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)


def in_ascii(text: str) -> str:
    """Replace the blocks in a text by characters that every terminal has."""
    return text.translate(str.maketrans(BLOCKS, IN_ASCII))


def width_of(text: str) -> int:
    """Return how many columns a text takes."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def padded(text: str, width: int, align: str = "<") -> str:
    """Fill a text with spaces to a width, on its right or (`>`) on its left."""
    space = " " * max(0, width - width_of(text))
    return space + text if align == ">" else text + space


def shortened(text: str, width: int) -> str:
    """Cut a long text in the middle: its end often says what tells it from others."""
    if width_of(text) <= width:
        return text
    left, right = (width - 2) // 2, width - 2 - (width - 2) // 2
    return f"{_first(text, left)}..{_first(text[::-1], right)[::-1]}"


def _first(text: str, width: int) -> str:
    used = 0
    for k, character in enumerate(text):
        used += _columns(character)
        if used > width:
            return text[:k]
    return text


def wrapped(text: str, width: int) -> str:
    """Fill a paragraph; a word that is wider than a line is broken."""
    lines = [""]
    for word in re.findall(r"\S+(?: %(?!\S))?", text):  # a number and its unit stay together
        if lines[-1] and width_of(lines[-1]) + 1 + width_of(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
        while width_of(lines[-1]) > width:
            part = _first(lines[-1], width)
            lines[-1:] = [part, lines[-1][len(part) :]]
    return "\n".join(filter(None, lines))


def pixels_of(text: str, size: float = 12) -> float:
    """Estimate the width of a text in a sans-serif font of a size."""
    narrow, wide = "ijl.,:;!'|()[] ", "mwMW%"
    letters = (0.36 if c in narrow else 0.91 if c in wide else 0.61 * _columns(c) for c in text)
    return size * sum(letters)


def interval_text(interval: Interval | None) -> str:
    """Print an interval with two digits of its half-width."""
    if interval is None:
        return NOT_MEASURED
    half = (interval.high - interval.low) / 2
    if not math.isfinite(half) or half <= 0:
        return digits(interval.estimate)
    places = 1 - math.floor(math.log10(half))
    low, high = _rounded(interval.low, places), _rounded(interval.high, places)
    return f"{_rounded(interval.estimate, places)} [{low}, {high}]"


def digits(value: float | None) -> str:
    """Print a number with three digits."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    return _rounded(value, 2 - math.floor(math.log10(abs(value)))) if value else "0"


def _rounded(value: float, places: int) -> str:
    return f"{round(value, places):,.{max(0, places)}f}"
