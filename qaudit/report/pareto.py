"""Bits per weight against the loss of the best subject, scheme by scheme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qaudit.report.document import Table, columns, name_cell, row
from qaudit.report.format import spread
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, Interval

NEAR = 1.15
"""Bits per weight within this factor are named together."""


@dataclass(frozen=True)
class Point:
    """The best subject under a scheme."""

    subject: str
    scheme: str
    bits_per_weight: float
    ce: Interval
    on_front: bool = False


def points(view: View) -> tuple[Point, ...]:
    """Return the best subject of every scheme, fewest bits first, marked where none beats it."""
    labels = tuple(subject.label for subject in view.subjects)
    found = []
    for scheme in (*view.schemes, FULL_PRECISION):
        best = view.best(scheme, labels)
        score = view.score(best, scheme) if best else None
        if best and score:
            found.append(Point(best, scheme, score.bits_per_weight, score.ce))
    found.sort(key=lambda point: (point.bits_per_weight, point.ce.estimate))
    marked, lowest = [], float("inf")
    for point in found:
        marked.append(replace(point, on_front=point.ce.estimate < lowest))
        lowest = min(lowest, point.ce.estimate)
    return tuple(marked)


def clusters(shown: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield points of nearly equal bits together; `shown` is in their order."""
    cluster: list[Point] = []
    for point in shown:
        if cluster and point.bits_per_weight > NEAR * cluster[0].bits_per_weight:
            yield cluster
            cluster = []
        cluster.append(point)
    if cluster:
        yield cluster


def pareto_table(view: View) -> Table:
    """Return the points as a table, fewest bits first."""
    names = ("bits per weight", "scheme", "best subject", "loss, nats per token", "on the front")
    rows = (
        row(
            f"{point.bits_per_weight:.2f}",
            point.scheme,
            name_cell(point.subject),
            spread(point.ce),
            "yes" if point.on_front else "",
        )
        for point in points(view)
    )
    return Table(columns(*names), tuple(rows))
