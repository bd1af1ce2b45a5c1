"""Whether matching a regular expression may take a time that explodes with the name's length.

Python's `re` backtracks and cannot be stopped, and family files are written by others. Nested
repeats are exponential; many repeats in a row are a polynomial of their number. Patterns of names
need neither, so both are refused when the file is read.
"""

from __future__ import annotations

import re._constants as op  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Iterable, Iterator
from typing import Any

# A name has at most 255 characters and, to be matched, 18 digits in a row: within these numbers a
# match that fails takes well under a second.
_MOST_REPEATS, _MOST_WIDE = 8, 2
_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT)
_DIGITS = ([(op.CATEGORY, op.CATEGORY_DIGIT)], [(op.RANGE, (ord("0"), ord("9")))])


def slow_reason(pattern: str) -> str | None:
    """Return why matching may be slow, or None."""
    repeats = list(_repeats(parser.parse(pattern), inside=False))
    if any(inside for _, inside in repeats):
        return "it repeats what already repeats or has alternatives"
    wide = sum(not _is_digit(node) for node, _ in repeats)
    if wide > _MOST_WIDE:
        return f"{wide} of its repeats match more than digits, and {_MOST_WIDE} may"
    if len(repeats) > _MOST_REPEATS:
        return f"it has {len(repeats)} repeats, and may have {_MOST_REPEATS}"
    return None


def _repeats(sequence: Iterable[Any], *, inside: bool) -> Iterator[tuple[Any, bool]]:
    """Yield every repeat of varying length, and alternatives in one; and whether it is nested."""
    for node in sequence:
        code, value = node
        varies = code in _REPEATS and value[0] != value[1]
        if (varies and (inside or value[1] > 1)) or (inside and code is op.BRANCH):
            yield node, inside
        for part in _parts(code, value):
            yield from _repeats(part, inside=inside or (code in _REPEATS and value[1] > 1))


def _parts(code: Any, value: Any) -> Iterable[Any]:
    """Return the sequences inside a node of the parser."""
    if code in _REPEATS or code is op.POSSESSIVE_REPEAT:
        return [value[2]]
    if code is op.SUBPATTERN:
        return [value[3]]
    if code is op.BRANCH:
        return list(value[1])
    if code in (op.ASSERT, op.ASSERT_NOT):
        return [value[1]]
    return [value] if code is op.ATOMIC_GROUP else []


def _is_digit(node: Any) -> bool:
    (body, *others) = node[1][2]
    return not others and body[0] is op.IN and body[1] in _DIGITS
