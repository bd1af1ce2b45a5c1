"""The fewest bits per weight within a margin of the best loss in full precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qaudit.core import statistics
from qaudit.judge.candidates import UNQUANTIZED, candidates, classes_of
from qaudit.judge.pooling import estimated
from qaudit.judge.table import Table
from qaudit.types import FULL_PRECISION, SELECTION, Interval, Measurement

SAME_BITS = 0.05
"""Bits per weight within which schemes cost the same: their scales differ by as much."""


@dataclass(frozen=True, eq=False)
class Cheapest:
    """Candidates within the margin, the fewest bits first, and what the margin is counted from."""

    reference: Measurement
    ranked: tuple[Measurement, ...]
    changes: tuple[str, ...] = ()


def cheapest(table: Table, margin: float, classes: Sequence[str] = ()) -> Cheapest | None:
    """Rank what is within a margin on the documents to choose on; None where nothing is."""
    full = candidates(table, UNQUANTIZED)
    if not full:
        return None
    reference = full[0]
    names = classes or (*classes_of(table), UNQUANTIZED)
    every = [
        _Candidate(m, excess(table, m, reference, SELECTION))
        for name in names
        for m in candidates(table, name)
    ]
    within = _cheapest_first([c for c in every if c.excess.high <= margin])
    if not within:
        return None
    changes = tuple(_cheaper(every, within[0], margin))
    return Cheapest(reference, tuple(c.measurement for c in within), changes)


def excess(table: Table, measured: Measurement, reference: Measurement, split: str) -> Interval:
    """Return the loss over that of a reference in full precision, as a fraction."""
    cells = [(measured.subject, measured.scheme), (reference.subject, FULL_PRECISION)]
    result = estimated(table, cells, statistics.excess, split=split)
    return result.interval if result else statistics.UNKNOWN


@dataclass(frozen=True, eq=False)
class _Candidate:
    measurement: Measurement
    excess: Interval  # over the reference's loss, as a fraction, on the documents to choose on

    @property
    def loss(self) -> float:
        return self.excess.estimate


def _cheapest_first(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Order by bits, and by loss among those of one price; only the first places matter."""
    left, ordered = list(candidates), []
    while left:
        price = min(c.measurement.bits_per_weight for c in left) + SAME_BITS
        same = [c for c in left if c.measurement.bits_per_weight <= price]
        ordered += sorted(same, key=lambda c: c.loss)
        left = [c for c in left if c.measurement.bits_per_weight > price]
    return ordered


def _cheaper(every: Sequence[_Candidate], best: _Candidate, margin: float) -> Iterator[str]:
    """Yield the margin within which fewer bits would do, for the nearest candidate."""
    bits = best.measurement.bits_per_weight - SAME_BITS
    cheaper = [c for c in every if c.measurement.bits_per_weight < bits]
    if not cheaper:
        return
    nearest = min(cheaper, key=lambda c: c.excess.high)
    measured, high = nearest.measurement, nearest.excess.high
    if np.isfinite(high) and high > margin:
        yield (
            f"within {100 * high:.2g} % it would be `{measured.subject}` at {measured.scheme} "
            f"({measured.bits_per_weight:.2f} bits)"
        )
