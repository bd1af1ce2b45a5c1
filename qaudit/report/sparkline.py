"""Error along the series in one line of text for each scheme, for terminals and step summaries.

Each line has its own scale: its lowest error is the lowest block, its highest the full one, and
both follow it as numbers. A long series is drawn in as many equal parts as there is room for,
each by the mean of its checkpoints. A part in which nothing was measured is `-`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from qaudit.report.format import NOT_MEASURED, percent, printable
from qaudit.report.series import error_of, trunk
from qaudit.report.views import View
from qaudit.report.width import padded, shortened, width_of
from qaudit.types import Interval

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
IN_ASCII = "_.:;=+*#"
LONGEST_NAME, LONGEST_LABEL, LONGEST_LINE = 24, 36, 30


def sparkline(values: Sequence[float | None], blocks: str = BLOCKS) -> str:
    """Draw numbers as blocks; what is missing or not finite is `-`."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return NOT_MEASURED * len(values)
    low, high = min(known), max(known)
    return "".join(
        _block(value, low, high, blocks)
        if value is not None and math.isfinite(value)
        else NOT_MEASURED
        for value in values
    )


def _block(value: float, low: float, high: float, blocks: str) -> str:
    """Let equal numbers be halfway up: they are neither low nor high."""
    share = (value - low) / (high - low) if high > low else 0.5
    return blocks[min(len(blocks) - 1, int(share * len(blocks)))]


def in_ascii(text: str) -> str:
    """Replace the blocks in a text by characters that every terminal has."""
    return text.translate(str.maketrans(BLOCKS, IN_ASCII))


def sparklines(view: View) -> list[str]:
    """Return a line for each scheme with two measured checkpoints, and what they show before."""
    main = trunk(view)
    drawn: list[tuple[str, str, str]] = []
    for scheme in view.schemes:
        errors = [error_of(view, subject, scheme) for subject in main]
        known = [e for e in errors if e is not None and math.isfinite(e.estimate)]
        if len(known) > 1:
            line = sparkline(_parts([None if e is None else e.estimate for e in errors]))
            drawn.append((shortened(printable(scheme), LONGEST_NAME), line, _ends(known)))
    if not drawn:
        return []
    wide = max(width_of(name) for name, _, _ in drawn)
    first, last = (shortened(printable(s.label), LONGEST_LABEL) for s in (main[0], main[-1]))
    head = f"Along the series, {first} to {last}, each line on its own scale, in %:"
    return [head, *(f"{padded(name, wide)}  {line}  {ends}" for name, line, ends in drawn)]


def _ends(known: Sequence[Interval]) -> str:
    """Print the lowest and the highest error of a line."""
    low, high = (choose(known, key=lambda e: e.estimate) for choose in (min, max))
    return f"{percent(low, bounds=False)} to {percent(high, bounds=False)}"


def _parts(values: Sequence[float | None]) -> list[float | None]:
    """Join neighbours where there are more numbers than a line has room for."""
    count = min(len(values), LONGEST_LINE)
    edges = [len(values) * k // count for k in range(count + 1)]
    return [_mean(values[a:b]) for a, b in pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None
