"""Soup minus ingredient under each scheme, with intervals: left of the line favours the soup.

Two panels for two questions that can have opposite answers: which of the quantized models is
better, and which of them lost less by quantization.
"""

from __future__ import annotations

import math

from qaudit.report.figures import frame
from qaudit.report.figures.drawing import WIDTH, Drawing, Label, Part, Series, Swatch, line
from qaudit.report.figures.frame import Scale, linear
from qaudit.report.figures.style import name
from qaudit.report.format import plural, spread
from qaudit.report.soups import WORDS, drawn, soup_reading
from qaudit.report.views import SoupRow, View
from qaudit.types import Comparison

LEFT, GAP, TOP = 116.0, 34.0, 30.0
ROW, SPACE = 13.0, 12.0
PANELS = (("outright", "Loss of the quantized models"), ("difference", "What quantization took"))
LOOKS = {  # marker, colour, filled
    "a_better": ("o", "c0", True),
    "b_better": ("s", "c1", True),
    "equivalent": ("D", "ink", True),
    "inconclusive": ("D", "ink", False),
}


def soups(view: View, alt: str) -> Drawing:
    soup, opponents, rows = drawn(view)
    heights = _heights(rows)
    bottom = max(heights) + ROW / 2 + 6
    wide = (WIDTH - LEFT - GAP - 16) / 2
    parts: list[Part] = [
        Label(name(scheme, 14), LEFT - 10, y + 4, "end strong")
        for scheme, y in _schemes(rows, heights).items()
    ]
    for k, (which, title) in enumerate(PANELS):
        left = LEFT + k * (wide + GAP)
        parts.append(Label(title, left, TOP - 10, "strong"))
        parts.append(Series(str(k), tuple(_panel(rows, heights, which, left, wide, bottom))))
    title = f"{name(soup.label, 40)} against its {plural(opponents, 'ingredient')}"
    more = f", one of {len(view.soups)} soups" if len(view.soups) > 1 else ""
    level = f"{100 * view.audit.plan.recipe.confidence:g} % intervals"
    verdicts = {c.verdict for row in rows for c in (row.outright, row.difference)}
    return Drawing(
        "soups",
        title + more,
        alt,
        tuple(parts),
        bottom + 44,
        f"{level}; bold lines: against the best ingredient of each scheme.",
        tuple(
            Swatch(WORDS[verdict], shape, f"mark {colour}{' hollow' * (not filled)}")
            for verdict, (shape, colour, filled) in LOOKS.items()
            if verdict in verdicts
        ),
    )


def _heights(rows: list[SoupRow]) -> list[float]:
    heights: list[float] = []
    y, before = TOP, None
    for row in rows:
        y += ROW if row.scheme == before else ROW + SPACE
        before = row.scheme
        heights.append(y)
    return heights


def _schemes(rows: list[SoupRow], heights: list[float]) -> dict[str, float]:
    of: dict[str, list[float]] = {}
    for row, y in zip(rows, heights, strict=True):
        of.setdefault(row.scheme, []).append(y)
    return {scheme: sum(values) / len(values) for scheme, values in of.items()}


def _panel(
    rows: list[SoupRow], heights: list[float], which: str, left: float, wide: float, bottom: float
) -> list[Part]:
    compared: list[Comparison] = [getattr(row, which) for row in rows]
    ends = [x for c in compared for x in (c.interval.low, c.interval.estimate, c.interval.high)]
    across = linear([0.0, *ends], left, left + wide, 4)
    parts = frame.lines_up(across, TOP, bottom)
    parts += frame.axis_below(across, bottom, name="nats per token, soup minus ingredient")
    for row, comparison, y in zip(rows, compared, heights, strict=True):
        if math.isfinite(comparison.interval.estimate):
            parts += _row(row, comparison, across, y)
    return parts


def _row(row: SoupRow, comparison: Comparison, across: Scale, y: float) -> list[Part]:
    shape, colour, filled = LOOKS[comparison.verdict]
    low, high = frame.bounds(comparison.interval)
    tip = [
        f"{row.scheme}: against {row.opponent}",
        f"{spread(comparison.interval)} nats per token: {WORDS[comparison.verdict]}",
        f"the soup is {soup_reading(row)}",
    ]
    middle = across.at(comparison.interval.estimate)
    kind = f"whisker {colour}" + " bold" * row.is_best
    return [
        line(across.at(low), y, across.at(high), y, kind),
        frame.mark(shape, middle, y, colour, tip, filled=filled),
    ]
