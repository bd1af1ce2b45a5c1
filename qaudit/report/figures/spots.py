"""Points of a plane with their names beside them, those that are alike across named together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from qaudit.report.figures import frame
from qaudit.report.figures.drawing import WIDTH, Label, Part, Path, line
from qaudit.report.figures.frame import Scale
from qaudit.report.figures.style import Look, fitted
from qaudit.report.format import pixels_of
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


def height_for(spots: Sequence[Spot]) -> float:
    """Return pixels in which the names of spots that are near each other have room."""
    tallest = max((len(cluster) for cluster in _near(spots)), default=0)
    return max(300.0, 2 * frame.NAME_HEIGHT * (tallest + 1))


def drawn(spots: Sequence[Spot], across: Scale, up: Scale) -> list[Part]:
    """Return the front, joined by steps: between two spots nothing is gained; then all spots."""
    front = sorted((s for s in spots if s.on_front), key=lambda s: s.across)
    placed = [(across.at(s.across), up.at(s.up)) for s in front]
    corners = [((x, before), (x, y)) for (_, before), (x, y) in pairwise(placed)]
    steps = (*placed[:1], *(point for corner in corners for point in corner))
    parts: list[Part] = [Path(steps, "front")]
    for cluster in _apart([_Cluster.of(one, across, up) for one in _near(spots)], across, up):
        parts += cluster.parts
    return parts


def _near(spots: Sequence[Spot]) -> Iterator[list[Spot]]:
    """Yield spots that are near each other together, from left to right."""
    cluster: list[Spot] = []
    for spot in sorted(spots, key=lambda spot: (spot.across, spot.up)):
        if cluster and spot.across > NEAR * cluster[0].across:
            yield cluster
            cluster = []
        cluster.append(spot)
    if cluster:
        yield cluster


def _apart(clusters: list[_Cluster], across: Scale, up: Scale) -> list[_Cluster]:
    """Join neighbours until the names of none cover the next one's."""
    for k, (one, other) in enumerate(pairwise(clusters)):
        if one.covers(other):
            joined = _Cluster.of([*one.spots, *other.spots], across, up)
            return _apart([*clusters[:k], joined, *clusters[k + 2 :]], across, up)
    return clusters


@dataclass(frozen=True)
class _Cluster:
    """Spots, and the places of their names in a column beside them."""

    spots: tuple[Spot, ...]
    marks: Mapping[str, tuple[float, float]]
    right: float  # where names begin
    heights: Mapping[str, float]  # of names
    whiskers: Mapping[str, Path]

    @classmethod
    def of(cls, spots: Sequence[Spot], across: Scale, up: Scale) -> _Cluster:
        """Place names at the right of all spots, above the front's line."""
        marks = {spot.name: (across.at(spot.across), up.at(spot.up)) for spot in spots}
        front = [marks[spot.name][1] for spot in spots if spot.on_front]
        above = max(front) - 0.7 * frame.NAME_HEIGHT if front else math.inf
        wanted = {name: y for name, (_, y) in marks.items()}
        whiskers = {
            s.name: frame.whisker(marks[s.name][0], s.interval, up, s.look.colour)
            for s in spots
            if s.interval is not None
        }
        return cls(
            tuple(spots),
            marks,
            max(x for x, _ in marks.values()) + 22,
            frame.at_ends(wanted, up.end, up.begin, above),
            whiskers,
        )

    def name(self, spot: Spot) -> str:
        """Return a name as far as there is room for it."""
        return fitted(spot.name, min(240.0, WIDTH - self.right))

    def covers(self, other: _Cluster) -> bool:
        """Return whether a name here reaches a spot or a name of a cluster at the right."""
        for spot in self.spots:
            end, y = self.right + pixels_of(self.name(spot)), self.heights[spot.name]
            places = [*other.marks.values(), *((other.right, h) for h in other.heights.values())]
            if any(x - 8 < end and abs(y - v) < frame.NAME_HEIGHT for x, v in places):
                return True
        return False

    @property
    def parts(self) -> list[Part]:
        """Draw lines to names, names, whiskers, and marks above all of them."""
        lines: list[Part] = []
        marks: list[Part] = []
        for spot in self.spots:
            (x, y), height = self.marks[spot.name], self.heights[spot.name]
            lines.append(line(x + 5, y, self.right - 4, height, "leader"))
            lines.append(Label(self.name(spot), self.right, height + 4))
            lines += [self.whiskers[spot.name]] if spot.name in self.whiskers else []
            look = spot.look
            marks.append(frame.mark(look.marker, x, y, look.colour, spot.tip, filled=spot.on_front))
        return [*lines, *marks]
