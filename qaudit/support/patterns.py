"""Regular expressions of others, which Python's `re` cannot stop once it has begun.

It backtracks: nested repeats are exponential in the length of a name, and many repeats in a row a
polynomial of their number. Patterns of names need neither, so both are refused unmatched.
"""

from __future__ import annotations

import re._constants as op  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Iterable, Iterator
from typing import Any

# A name has at most 255 characters and, to be matched, 18 digits in a row: within these numbers a
# match that fails takes well under a second.
_MOST_REPEATS = 8
_MOST_WAYS = 1 << 12  # those of families that ship have fewer than 100
_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT)
_DIGITS = ([(op.CATEGORY, op.CATEGORY_DIGIT)], [(op.RANGE, (ord("0"), ord("9")))])


def slow_reason(pattern: str, *, most_wide: int = 2) -> str | None:
    """Return why matching may take a time that explodes with the name's length, or None."""
    parsed = parser.parse(pattern)
    repeats = list(_repeats(parsed, inside=False))
    if any(inside for _, inside in repeats):
        return "it repeats what already repeats or has alternatives"
    bodies = [node[1][2] for node, _ in repeats]
    wide = sum(len(b) > 1 or b[0][0] is not op.IN or b[0][1] not in _DIGITS for b in bodies)
    if wide > most_wide:
        return f"{wide} of its repeats match more than digits, and {most_wide} may"
    if len(repeats) > _MOST_REPEATS:
        return f"it has {len(repeats)} repeats, and may have {_MOST_REPEATS}"
    if (ways := _ways(parsed)) > _MOST_WAYS:
        return f"its optional parts and alternatives combine in {ways:,} ways"
    return None


def _ways(sequence: Iterable[Any]) -> int:
    """Return how many ways alternatives and optional parts combine in, each of which is tried."""
    ways = 1
    for code, value in sequence:
        parts = [_ways(part) for part in _parts(code, value)]
        if code is op.BRANCH:
            ways *= sum(parts)
        elif parts:
            optional = code in _REPEATS and value[:2] == (0, 1)
            ways *= parts[0] + optional
    return ways


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
    if code in _REPEATS or code is op.POSSESSIVE_REPEAT:
        return [value[2]]
    if code is op.SUBPATTERN:
        return [value[3]]
    if code is op.BRANCH:
        return list(value[1])
    if code in (op.ASSERT, op.ASSERT_NOT):
        return [value[1]]
    if code is op.GROUPREF_EXISTS:
        return [part for part in value[1:] if part is not None]
    return [value] if code is op.ATOMIC_GROUP else []
