"""Points of a plane with their names beside them, those that are alike across named together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from qaudit.report.figures import frame
from qaudit.report.figures.drawing import WIDTH, Label, Part, Path, line
from qaudit.report.figures.frame import Scale
from qaudit.report.figures.style import Look, fitted
from qaudit.types import Interval

NEAR = 1.15
"""Spots within this factor across are named together."""


@dataclass(frozen=True)
class Spot:
    """A point: filled where it is on the front, with a whisker where it has an interval."""

    name: str
    across: float
    up: float
    on_front: bool
    look: Look
    tip: tuple[str, ...] = ()
    interval: Interval | None = None


def clusters(spots: Sequence[Spot]) -> Iterator[list[Spot]]:
    """Yield spots that are near each other together, from left to right."""
    cluster: list[Spot] = []
    for spot in sorted(spots, key=lambda spot: (spot.across, spot.up)):
        if cluster and spot.across > NEAR * cluster[0].across:
            yield cluster
            cluster = []
        cluster.append(spot)
    if cluster:
        yield cluster


def height_for(spots: Sequence[Spot]) -> float:
    """Return pixels in which the names of each cluster are one above the other."""
    tallest = max((len(cluster) for cluster in clusters(spots)), default=0)
    return max(300.0, 2 * frame.NAME_HEIGHT * (tallest + 1))


def drawn(spots: Sequence[Spot], across: Scale, up: Scale) -> list[Part]:
    """Return the front, joined by steps: between two spots nothing is gained; then all spots."""
    front = sorted((s for s in spots if s.on_front), key=lambda s: s.across)
    placed = [(across.at(s.across), up.at(s.up)) for s in front]
    corners = [((x, before), (x, y)) for (_, before), (x, y) in pairwise(placed)]
    steps = (*placed[:1], *(point for corner in corners for point in corner))
    parts: list[Part] = [Path(steps, "front")]
    for cluster in clusters(spots):
        parts += _cluster(cluster, across, up)
    return parts


def _cluster(cluster: list[Spot], across: Scale, up: Scale) -> list[Part]:
    """Draw spots with their names at the right, above the front's line."""
    heights = {spot.name: up.at(spot.up) for spot in cluster}
    front = [heights[spot.name] for spot in cluster if spot.on_front]
    above = max(front) - 0.7 * frame.NAME_HEIGHT if front else math.inf
    placed = frame.at_ends(heights, up.end, up.begin, above)
    right = max(across.at(spot.across) for spot in cluster) + 22
    lines: list[Part] = []
    marks: list[Part] = []
    for spot in cluster:
        x, y, look = across.at(spot.across), heights[spot.name], spot.look
        words = fitted(spot.name, min(240.0, WIDTH - right))
        lines.append(line(x + 5, y, right - 4, placed[spot.name], "leader"))
        lines.append(Label(words, right, placed[spot.name] + 4))
        if spot.interval is not None:
            lines.append(frame.whisker(x, spot.interval, up, look.colour))
        marks.append(frame.mark(look.marker, x, y, look.colour, spot.tip, filled=spot.on_front))
    return [*lines, *marks]
