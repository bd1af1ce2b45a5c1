"""Points of a plane with their names beside them, those that are alike across named together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from qaudit.report.figures import frame
from qaudit.report.figures.drawing import WIDTH, Drawing, Label, Part, Path, Series, line
from qaudit.report.figures.frame import Scale, linear_ticks, widened
from qaudit.report.figures.style import Look, fitted, looks, name
from qaudit.report.format import pixels_of, spread
from qaudit.report.pick import Point, points
from qaudit.report.views import View
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
    for cluster in _apart(
        [_Cluster.of(members, across, up) for members in _near(spots)], across, up
    ):
        parts += cluster.parts
    return parts


def _near(spots: Sequence[Spot]) -> Iterator[list[Spot]]:
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
    for k, (cluster, other) in enumerate(pairwise(clusters)):
        if cluster.covers(other):
            joined = _Cluster.of([*cluster.spots, *other.spots], across, up)
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


LEFT, RIGHT, TOP = 64.0, 840.0, 30.0
TICKS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)


def pareto(view: View, alt: str) -> Drawing:
    shown = [p for p in points(view) if p.bits_per_weight > 0 and math.isfinite(p.ce.estimate)]
    subjects, look = {p.subject for p in shown}, looks(view.schemes)
    spots = [_spot(p, look.get(p.scheme, Look("ink", "o")), len(subjects) > 1) for p in shown]
    bottom = TOP + height_for(spots)
    bits = [p.bits_per_weight for p in shown] or [1.0]
    low, high = min(bits) / 1.12, max(bits) * 1.6  # names are at the right of their marks
    ticks = tuple(float(tick) for tick in TICKS if low <= tick <= max(bits) * 1.12)
    across = Scale(low, high, LEFT, RIGHT, ticks, math.log)
    losses = widened([p.ce.estimate for p in shown], 0.1)
    up = Scale(*losses, bottom, TOP, tuple(linear_ticks(*losses)))
    parts: list[Part] = [
        *frame.axis_left(up, LEFT, RIGHT),
        *frame.axis_below(across, bottom, name="bits per weight"),
        Label("loss of the best subject, nats per token", 0, 12, "faint"),
        *drawn(spots, across, up),
    ]
    note = "Filled, and joined by the line: nothing with fewer bits is better."
    if len(subjects) == 1:
        note += f" The best subject is {name(shown[0].subject)} everywhere."
    return Drawing(
        "pareto",
        "What fewer bits cost, each scheme at its best subject",
        alt,
        (Series("0", tuple(parts)),),
        bottom + 42,
        note,
    )


def _spot(point: Point, look: Look, several: bool) -> Spot:
    tip = (
        f"{point.scheme}: {point.bits_per_weight:.2f} bits per weight",
        point.subject,
        f"loss {spread(point.ce)} nats per token",
    )
    named = f"{point.scheme}: {point.subject}" if several else point.scheme
    bits, loss = point.bits_per_weight, point.ce.estimate
    return Spot(named, bits, loss, point.on_front, look, tip)
