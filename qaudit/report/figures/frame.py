"""Axes, and names at the ends of lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from qaudit.report.figures.drawing import Label, Mark, Part, Path, band, line
from qaudit.report.figures.scales import Scale
from qaudit.report.figures.style import Look
from qaudit.types import Interval

NAME_HEIGHT = 16.0


def axis_left(
    scale: Scale, left: float, right: float, show: Callable[[float], str] = "{:g}".format
) -> list[Part]:
    """Return numbers at the left and faint lines across the panel."""
    parts: list[Part] = []
    for tick in scale.ticks:
        y = scale.at(tick)
        parts.append(line(left, y, right, y, "zero" if tick == 0 else "grid"))
        parts.append(Label(show(tick), left - 7, y + 4, "end"))
    return parts


def axis_below(
    scale: Scale, y: float, show: Callable[[float], str] = "{:g}".format, name: str = ""
) -> list[Part]:
    """Return a line with numbers beneath it, and its name beneath them."""
    parts: list[Part] = [line(scale.begin, y, scale.end, y, "axis")]
    for tick in scale.ticks:
        parts.append(line(scale.at(tick), y, scale.at(tick), y + 4, "axis"))
        parts.append(Label(show(tick), scale.at(tick), y + 17, "middle"))
    if name:
        parts.append(Label(name, (scale.begin + scale.end) / 2, y + 34, "middle"))
    return parts


def curve(points: Sequence[tuple[float, Interval]], up: Scale, look: Look) -> list[Part]:
    """Return a line through estimates and the band of their intervals.

    A bound that is not finite reaches the edge of the scale.
    """
    ends = [(x, *bounds(interval)) for x, interval in points]
    middle = tuple((x, up.at(interval.estimate)) for x, interval in points)
    return [
        band([(x, up.at(b)) for x, _, b in ends], [(x, up.at(a)) for x, a, _ in ends], look.colour),
        Path(middle, look.stroke),
    ]


def whisker(x: float, interval: Interval, up: Scale, colour: str) -> Path:
    """Return an upright line over an interval."""
    low, high = bounds(interval)
    return line(x, up.at(low), x, up.at(high), f"whisker {colour}")


def bounds(interval: Interval) -> tuple[float, float]:
    """Return the bounds of an interval; one that is not a number is infinite."""
    low, high = interval.low, interval.high
    return -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high


def mark(  # noqa: PLR0913 - the look of a mark and its place
    shape: str,
    x: float,
    y: float,
    colour: str,
    tip: Sequence[str] = (),
    *,
    filled: bool = True,
    quiet: bool = False,
) -> Mark:
    """Return a mark; a quiet one appears only when it is pointed at."""
    kind = "mark" + " hollow" * (not filled) + " quiet" * quiet + f" {colour}"
    return Mark(shape, x, y, kind, tuple(filter(None, tip)))


def at_ends(
    heights: Mapping[str, float], top: float, bottom: float, at_most: float = math.inf
) -> dict[str, float]:
    """Return heights for names at which they do not overlap, inside a panel where they fit.

    Names are `NAME_HEIGHT` apart, in the order of their wanted heights, and the lowest of them is
    not below `at_most` (a line that they would cover) if there is room above.
    """
    placed = spread_out(heights, NAME_HEIGHT)
    if not placed:
        return {}
    half = NAME_HEIGHT / 2
    shift = max(0.0, top + half - min(placed.values()))
    shift = shift or min(0.0, min(bottom - half, at_most) - max(placed.values()))
    if min(placed.values()) + shift < top + half:
        shift = top + half - min(placed.values())
    return {name: y + shift for name, y in placed.items()}


def spread_out(heights: Mapping[str, float], gap: float) -> dict[str, float]:
    """Move heights apart until neighbours differ by a gap, and keep their order and middle."""
    blocks: list[tuple[float, list[str]]] = []
    for name in sorted(heights, key=heights.__getitem__):
        middle, names = heights[name], [name]
        while blocks and middle - gap * (len(names) - 1) / 2 < (
            blocks[-1][0] + gap * (len(blocks[-1][1]) + 1) / 2
        ):
            names = blocks.pop()[1] + names
            middle = sum(heights[n] for n in names) / len(names)
        blocks.append((middle, names))
    return {
        name: middle + gap * (k - (len(names) - 1) / 2)
        for middle, names in blocks
        for k, name in enumerate(names)
    }
