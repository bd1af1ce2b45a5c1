"""Checkpoints of one run against each other, all pairs of a question at once.

Choosing the pair that shows most is then no luck: the intervals of all pairs hold together
(Bonferroni), including those that are not shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from qaudit.core import statistics
from qaudit.core.series.course import Places
from qaudit.judge.pooling import estimated
from qaudit.judge.table import Table
from qaudit.types import FULL_PRECISION, Checkpoint, Interval

MOST = 32
"""Of a longer run so many checkpoints are compared in pairs, spread evenly, its ends among them."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run's checkpoints, their places, and the measurements of the whole audit."""

    table: Table
    checkpoints: list[Checkpoint]
    places: Places

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Labels in training order."""
        return tuple(c.label for c in self.checkpoints)

    @cached_property
    def schemes(self) -> tuple[str, ...]:
        """Quantized schemes under which every checkpoint of the run has a finite loss."""
        return tuple(s for s in self.table.quantized_schemes if self.is_measured(s))

    def is_measured(self, scheme: str) -> bool:
        """Return whether every checkpoint of the run has a finite loss under a scheme."""
        cells = [(label, which) for label in self.labels for which in {scheme, FULL_PRECISION}]
        return estimated(self.table, cells, _first) is not None

    @cached_property
    def is_solid(self) -> bool:
        """Whether there are enough documents for a verdict."""
        return self.table.documents >= statistics.MINIMUM_DOCUMENTS

    @cached_property
    def thinned(self) -> tuple[int, ...]:
        """Which checkpoints are compared in pairs."""
        last = len(self.labels) - 1
        if last < MOST:
            return tuple(range(last + 1))
        return tuple(sorted({round(k * last / (MOST - 1)) for k in range(MOST)}))

    @property
    def pairs(self) -> int:
        """How many pairs there are."""
        return len(self.thinned) * (len(self.thinned) - 1) // 2

    def level(self, at_once: int) -> float:
        """Return the confidence each of so many intervals needs."""
        return statistics.simultaneous(self.table.confidence, at_once)

    def loss(self, scheme: str, a: int, b: int, level: float) -> Interval:
        """Return the loss at b minus the loss at a, in nats per token."""
        cells = [(self.labels[b], scheme), (self.labels[a], scheme)]
        found = estimated(self.table, cells, statistics.change, confidence=level)
        return found.interval if found else statistics.UNKNOWN

    def error(self, scheme: str, a: int, b: int, level: float) -> Interval:
        """Return the relative error at b minus that at a, a fraction."""
        cells = [(self.labels[k], which) for k in (b, a) for which in (scheme, FULL_PRECISION)]
        found = estimated(self.table, cells, statistics.excess_difference, confidence=level)
        return found.interval if found else statistics.UNKNOWN

    def full_loss(self, k: int) -> float:
        """Return a checkpoint's loss in full precision, in nats per token."""
        cells = [(self.labels[k], FULL_PRECISION)]
        found = estimated(self.table, cells, statistics.per_token)
        return found.interval.estimate if found else statistics.UNKNOWN.estimate


def _first(sums: statistics.Array) -> statistics.Array:
    found: statistics.Array = sums[0]
    return found
