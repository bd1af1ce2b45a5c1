"""What fewer bits cost: bits per weight against the loss of the best subject of every scheme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qaudit.report.document import Block, Table, columns, fold, name_cell, paragraph, row
from qaudit.report.format import listing, loss, spread
from qaudit.report.series import picture
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, Interval
from qaudit.types.rows import Row

NEAR = 1.15
"""Bits per weight within this factor are named together."""


@dataclass(frozen=True)
class Point(Row):
    """The best subject under a scheme."""

    subject: str
    scheme: str
    bits_per_weight: float
    ce: Interval
    on_front: bool = False


def points(view: View) -> tuple[Point, ...]:
    """Return the best subject of every scheme, fewest bits first, marked where none beats it."""
    best_points = []
    for scheme in (*view.schemes, FULL_PRECISION):
        best = view.best(scheme)
        score = view.score(best, scheme) if best else None
        if best and score:
            best_points.append(Point(best, scheme, score.bits_per_weight, score.ce))
    best_points.sort(key=lambda point: (point.bits_per_weight, point.ce.estimate))
    marked, lowest = [], float("inf")
    for point in best_points:
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


def pareto_section(view: View) -> tuple[Block, ...]:
    """Name the front, show it, and fold the numbers."""
    if len(view.schemes) < 2:
        return ()
    every = points(view)
    front = [p for p in every if p.on_front]
    sentence = (
        "Fewest bits first, each better by estimate than all with fewer: "
        + listing([f"{p.scheme} ({p.bits_per_weight:.2f} bits, {loss(p.ce)})" for p in front])
        + ". The loss, in nats per token, is that of the best subject under each scheme."
    )
    table = fold(f"All {len(every)} schemes", pareto_table(view))
    return (paragraph(sentence), *picture(view, "pareto"), table)
