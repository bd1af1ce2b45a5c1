"""Every subject under every scheme that may ship, by bit class, the best first.

Subject and scheme compete together within a bit class. They are ordered on the documents to choose
on, Equal losses keep the order of the series, and then that of names,
so that the order of `--schemes` changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qaudit.core import statistics
from qaudit.core.scheme import most_bits_first
from qaudit.judge.objectives import LOSS, Objective
from qaudit.judge.pooling import interval_of
from qaudit.judge.table import Measurements, Sums, divergences, is_finite, losses
from qaudit.types import FULL_PRECISION, HELD_OUT, SELECTION, Interval, Measurement

UNQUANTIZED = "fp"
"""The class of full precision, which only an objective that names it chooses."""


def classes_of(table: Measurements) -> tuple[str, ...]:
    names = {m.bit_class for m in table.measurements if m.scheme != FULL_PRECISION}
    return tuple(sorted(names, key=most_bits_first))


def candidates(
    table: Measurements, name: str, objective: Objective = LOSS, split: str | None = SELECTION
) -> list[Measurement]:
    """Return every candidate of a class, the best first, without twins."""
    ranked = _ranked(table, list(_finite(table, name, objective.scheme)), split)
    if objective.kind == "kl" and ranked:
        same = [m for m in ranked if m.subject == ranked[0].subject]
        return _ranked(table, [m for m in same if m.evidence.fidelity], split, divergences)
    return ranked


def cross_fitted(
    table: Measurements, name: str, objective: Objective
) -> tuple[list[Measurement], str | None]:
    """Return the candidates of a class, and the documents to judge the best on.

    These are all of them where both halves choose the same, and otherwise those that did not
    choose: the winner of many looks better than it is on the documents that it won on.
    """
    ranked = candidates(table, name, objective)
    if len(ranked) < 2 or not table.is_split:
        return ranked, None
    every = candidates(table, name, objective, None)
    if ranked[0] is candidates(table, name, objective, HELD_OUT)[0] is every[0]:
        return every, None
    return ranked, HELD_OUT


def _finite(table: Measurements, name: str, scheme: str | None) -> Iterator[Measurement]:
    for subject in table.subjects:
        for one in sorted((*table.quantized_schemes, FULL_PRECISION)):
            measured = table.find(subject.label, one)
            if measured is None or measured.bit_class != name or scheme not in (None, one):
                continue
            if is_finite(measured):
                yield measured


def _ranked(
    table: Measurements, cells: Sequence[Measurement], split: str | None, sums: Sums = losses
) -> list[Measurement]:
    if not cells:
        return []
    scored = table.scored(split)
    return _without_twins(sorted(cells, key=lambda cell: float(sums(cell.evidence)[scored].sum())))


def _without_twins(ranked: Sequence[Measurement]) -> list[Measurement]:
    """Leave out cells with the losses of an earlier one, to the bit: two names of one model."""
    distinct: list[Measurement] = []
    for measured in ranked:
        nll_sum = measured.evidence.nll_sum
        if not any(np.array_equal(nll_sum, other.evidence.nll_sum) for other in distinct):
            distinct.append(measured)
    return distinct


SAME_BITS = 0.05
"""Bits per weight within which schemes cost the same: their scales differ by as much."""


@dataclass(frozen=True, eq=False)
class Cheapest:
    """Candidates within the margin, the fewest bits first, and what the margin is counted from."""

    reference: Measurement
    ranked: tuple[Measurement, ...]
    changes: tuple[str, ...] = ()
    split: str | None = None  # of documents to judge the first on

    @property
    def choice(self) -> tuple[Measurement, Measurement]:
        return self.reference, self.ranked[0]


def cheapest(table: Measurements, margin: float, classes: Sequence[str] = ()) -> Cheapest | None:
    """Rank what is within a margin, cross-fitted; None where nothing is."""
    chosen = _cheapest_on(SELECTION, table, margin, classes)
    if chosen is None or not table.is_split:
        return chosen
    other = _cheapest_on(HELD_OUT, table, margin, classes)
    if other is not None and all(map(operator.is_, chosen.choice, other.choice)):
        every = _cheapest_on(None, table, margin, classes)
        if every is not None and all(map(operator.is_, chosen.choice, every.choice)):
            return every
    return replace(chosen, split=HELD_OUT)


def _cheapest_on(
    split: str | None, table: Measurements, margin: float, classes: Sequence[str]
) -> Cheapest | None:
    full = candidates(table, UNQUANTIZED, split=split)
    if not full:
        return None
    reference = full[0]
    names = classes or (*classes_of(table), UNQUANTIZED)
    every = [
        _Candidate(m, excess(table, m, reference, split))
        for name in names
        for m in candidates(table, name, split=split)
    ]
    within = _cheapest_first([c for c in every if c.excess.high <= margin])
    if not within:
        return None
    changes = tuple(_cheaper(every, within[0], margin))
    return Cheapest(reference, tuple(c.measurement for c in within), changes)


def excess(
    table: Measurements, measured: Measurement, reference: Measurement, split: str | None
) -> Interval:
    """Return the loss over that of a reference in full precision, as a fraction."""
    cells = [(measured.subject, measured.scheme), (reference.subject, FULL_PRECISION)]
    return interval_of(table, cells, statistics.excess, split=split) or statistics.UNKNOWN


@dataclass(frozen=True, eq=False)
class _Candidate:
    measurement: Measurement
    excess: Interval  # over the reference's loss, as a fraction, on the documents to choose on

    @property
    def loss(self) -> float:
        return self.excess.estimate


def _cheapest_first(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Order by bits, and by loss among those of one price; only the first places matter."""
    remaining, ordered = list(candidates), []
    while remaining:
        price = min(c.measurement.bits_per_weight for c in remaining) + SAME_BITS
        same = [c for c in remaining if c.measurement.bits_per_weight <= price]
        ordered += sorted(same, key=lambda c: c.loss)
        remaining = [c for c in remaining if c.measurement.bits_per_weight > price]
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
