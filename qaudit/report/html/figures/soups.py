"""Soup minus ingredient under each scheme, with intervals: left of the line favours the soup."""

from __future__ import annotations

import math

from qaudit.report.elements import EMPTY, Html, element, joined
from qaudit.report.format import spread
from qaudit.report.html.figures import frame
from qaudit.report.html.figures.frame import Scale
from qaudit.report.looks import VERDICT_LOOKS, name
from qaudit.report.scales import linear_ticks
from qaudit.report.sentences import soup_reading
from qaudit.report.soups import WORDS, Row, drawn
from qaudit.report.views import View
from qaudit.types import Comparison

LEFT, GAP, TOP = 116.0, 34.0, 30.0
ROW, SPACE = 13.0, 12.0
PANELS = (("outright", "Loss of the quantized models"), ("difference", "What quantization took"))


def soups(view: View, description: str) -> Html:
    """Draw both differences of the first soup to its ingredients, a row for each."""
    soup, opponents, rows = drawn(view)
    heights = _heights(rows)
    bottom = max(heights) + ROW / 2 + 6
    wide = (frame.WIDTH - LEFT - GAP - 16) / 2
    panels = [
        _panel(rows, heights, which, title, LEFT + k * (wide + GAP), wide, bottom)
        for k, (which, title) in enumerate(PANELS)
    ]
    title = f"{name(soup.label, 40)} against its {opponents} ingredients"
    more = f", one of {len(view.soups)} soups" if len(view.soups) > 1 else ""
    level = f"{100 * view.audit.plan.recipe.confidence:g} % intervals"
    note = frame.note(f"{level}; bold lines: against the best ingredient of each scheme.")
    legend = frame.legend(_legend(rows))
    names = [
        frame.label(name(scheme, 16), LEFT - 10, y + 4, "end strong")
        for scheme, y in _schemes(rows, heights).items()
    ]
    drawing = joined([*names, *panels])
    return frame.figure("soups", title + more, description, drawing, bottom + 44, note, legend)


def _heights(rows: list[Row]) -> list[float]:
    """Place rows beneath each other, schemes apart."""
    found: list[float] = []
    y, before = TOP, None
    for row in rows:
        y += ROW if row.scheme == before else ROW + SPACE
        before = row.scheme
        found.append(y)
    return found


def _schemes(rows: list[Row], heights: list[float]) -> dict[str, float]:
    """Return the middle of each scheme's rows."""
    of: dict[str, list[float]] = {}
    for row, y in zip(rows, heights, strict=True):
        of.setdefault(row.scheme, []).append(y)
    return {scheme: sum(found) / len(found) for scheme, found in of.items()}


def _panel(  # noqa: PLR0913 - a panel is placed by them
    rows: list[Row],
    heights: list[float],
    which: str,
    title: str,
    left: float,
    wide: float,
    bottom: float,
) -> Html:
    found: list[Comparison] = [getattr(row, which) for row in rows]
    ends = [x for c in found for x in (c.interval.low, c.interval.estimate, c.interval.high)]
    low, high = frame.widened([0.0, *ends])
    across = Scale(low, high, left, left + wide, tuple(linear_ticks(low, high, 4)))
    parts = [frame.label(title, left, TOP - 10, "strong")]
    parts += [
        frame.line(across.at(t), TOP, across.at(t), bottom, "zero" if t == 0 else "grid")
        for t in across.ticks
    ]
    axis = "nats per token, soup minus ingredient"
    parts += [frame.axis_below(across, bottom, lambda tick: f"{tick:g}", axis)]
    for row, comparison, y in zip(rows, found, heights, strict=True):
        parts += [_point(row, comparison, across, y)]
    return element("g", *parts, class_="series", data_series=[w for w, _ in PANELS].index(which))


def _point(row: Row, found: Comparison, across: Scale, y: float) -> Html:
    shade, shape, filled = VERDICT_LOOKS[found.verdict]
    interval = found.interval
    if not math.isfinite(interval.estimate):
        return EMPTY
    low = interval.low if math.isfinite(interval.low) else across.low
    high = interval.high if math.isfinite(interval.high) else across.high
    kind = f"whisker {frame.colour(shade)}" + (" bold" if row.is_best else "")
    tip = [
        f"{row.scheme}: against {row.opponent}",
        f"{spread(interval)} nats per token: {WORDS[found.verdict]}",
        f"the soup is {soup_reading(row.outright, row.difference)}",
    ]
    middle = across.at(interval.estimate)
    parts = [frame.line(across.at(low), y, across.at(high), y, kind)]
    return joined([*parts, frame.mark(shape, middle, y, shade, tip, filled=filled)])


def _legend(rows: list[Row]) -> list[Html]:
    verdicts = {c.verdict for row in rows for c in (row.outright, row.difference)}
    return [
        frame.swatch(shade, shape, WORDS[verdict], filled=filled)
        for verdict, (shade, shape, filled) in VERDICT_LOOKS.items()
        if verdict in verdicts
    ]
