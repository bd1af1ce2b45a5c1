"""How wide text is on a terminal, and texts cut and filled by that width.

Chinese, Japanese and Korean characters take two columns and combining marks none, so that the
number of characters says little. What a terminal makes of joined emoji cannot be known; each
character of them counts by itself.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator


def width_of(text: str) -> int:
    """Return how many columns a text takes."""
    return sum(map(_columns, text))


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
    """Return as much of a text as fits."""
    taken = 0
    for k, character in enumerate(text):
        taken += _columns(character)
        if taken > width:
            return text[:k]
    return text


def wrapped(text: str, width: int) -> str:
    """Fill a paragraph; a word that is wider than a line is broken."""
    return "\n".join(_lines(text, width))


def _lines(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and width_of(line) + 1 + width_of(word) > width:
            yield line
            line = ""
        line = f"{line} {word}" if line else word
        while width_of(line) > width:
            part = _first(line, width)
            yield part
            line = line[len(part) :]
    if line:
        yield line


def pixels_of(text: str, size: float = 12) -> float:
    """Estimate the width of a text in a sans-serif font of a size."""
    narrow, wide = "ijl.,:;!'|()[] ", "mwMW%"
    letters = (0.36 if c in narrow else 0.91 if c in wide else 0.61 * _columns(c) for c in text)
    return size * sum(letters)
