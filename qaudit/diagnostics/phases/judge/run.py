"""Checkpoints of one run against each other: its decay, the end of improvement, three phases.

All pairs of a question are compared at once. Choosing the pair that shows most is then no luck:
the intervals of all pairs hold together (Bonferroni), including those that are not shown.

No detectable improvement is not the absence of improvement. The loss has stopped improving from a
checkpoint on if every later one is better by less than `BARELY` of the loss, with all of its
interval and for all pairs at once. It has not stopped before a checkpoint that a later one beats.
The stretch between the two is returned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from qaudit.core import statistics
from qaudit.core.course import Places
from qaudit.judge.pooling import columns_of, interval_of
from qaudit.judge.table import Measurements
from qaudit.types import FULL_PRECISION, Checkpoint, Interval, PhaseReading, Span

MOST = 32
"""Of a longer run so many checkpoints are compared in pairs, spread evenly, its ends among them."""

BARELY = 0.005
"""Of the full-precision loss: half a percent, about what four bits take of a small model."""

FEWEST = 3
"""Checkpoints of a run: fewer show no end of anything."""


@dataclass(frozen=True, eq=False)
class PhaseRun:
    """One run's checkpoints, their places, and the measurements of the whole audit."""

    table: Measurements
    checkpoints: list[Checkpoint]
    places: Places

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return tuple(c.label for c in self.checkpoints)

    @cached_property
    def schemes(self) -> tuple[str, ...]:
        """Quantized schemes under which every checkpoint of the run has a finite loss."""
        return tuple(s for s in self.table.quantized_schemes if self.is_measured(s))

    def is_measured(self, scheme: str) -> bool:
        cells = [(label, which) for label in self.labels for which in (scheme, FULL_PRECISION)]
        return columns_of(self.table, cells) is not None

    @cached_property
    def is_solid(self) -> bool:
        """Whether there are enough documents for a verdict."""
        return self.table.documents >= statistics.MINIMUM_DOCUMENTS

    @cached_property
    def thinned(self) -> tuple[int, ...]:
        last = len(self.labels) - 1
        if last < MOST:
            return tuple(range(last + 1))
        return tuple(sorted({round(k * last / (MOST - 1)) for k in range(MOST)}))

    @property
    def pairs(self) -> int:
        return len(self.thinned) * (len(self.thinned) - 1) // 2

    def level(self, at_once: int) -> float:
        return statistics.simultaneous(self.table.confidence, at_once)

    def loss(self, scheme: str, a: int, b: int, level: float) -> Interval:
        """Return the loss at b minus the loss at a, in nats per token."""
        cells = [(self.labels[b], scheme), (self.labels[a], scheme)]
        change = interval_of(self.table, cells, statistics.change, confidence=level)
        return change or statistics.UNKNOWN

    def error(self, scheme: str, a: int, b: int, level: float) -> Interval:
        """Return the relative error at b minus that at a, a fraction."""
        cells = [(self.labels[k], which) for k in (b, a) for which in (scheme, FULL_PRECISION)]
        change = interval_of(self.table, cells, statistics.excess_difference, confidence=level)
        return change or statistics.UNKNOWN

    def full_loss(self, k: int) -> float:
        loss = interval_of(self.table, [(self.labels[k], FULL_PRECISION)], statistics.per_token)
        return (loss or statistics.UNKNOWN).estimate


def decay_of(run: PhaseRun) -> tuple[Span | None, str]:
    """Return the stretch in which the rate leaves its peak for good, or why there is none.

    The start is between the last checkpoint at the peak and the one after it.
    """
    rates = [c.learning_rate for c in run.checkpoints]
    if any(rate is None for rate in rates):
        return None, "the learning rate is not known at every checkpoint"
    numbers = [rate or 0.0 for rate in rates]
    peak = max(numbers)
    at_peak = [k for k, rate in enumerate(numbers) if math.isclose(rate, peak, rel_tol=1e-6)]
    if at_peak[-1] == len(numbers) - 1:
        return None, "the learning rate does not fall before the last checkpoint"
    if at_peak == [0]:
        return None, "the learning rate falls from the first checkpoint on, or before it"
    low, high = at_peak[-1], at_peak[-1] + 1
    x = run.places.positions
    return Span(x[low], x[high], run.labels[low], run.labels[high]), ""


def loss_end_of(run: PhaseRun) -> tuple[Span | None, str]:
    """Return the stretch in which full-precision loss stops improving, or why there is none."""
    if len(run.thinned) < FEWEST or not run.is_solid:
        return None, "too few checkpoints or documents"
    level = run.level(run.pairs)
    among = run.thinned
    later = [
        [run.loss(FULL_PRECISION, a, b, level) for b in among[k + 1 :]] for k, a in enumerate(among)
    ]
    flat = [
        all(gain.low > -BARELY * run.full_loss(a) for gain in rest)
        for a, rest in zip(among, later, strict=True)
    ]
    ends = next((k for k in range(len(among) - 1) if all(flat[k:])), None)
    if ends is None:
        return None, _why_none(run, later)
    beaten = [k for k, rest in enumerate(later) if any(gain.high < 0 for gain in rest)]
    first = min(ends, max(beaten) + 1) if beaten else 0
    x = run.places.positions
    low, high = among[first], among[ends]
    return Span(x[low], x[high], run.labels[low], run.labels[high]), ""


def _why_none(run: PhaseRun, later: list[list[Interval]]) -> str:
    last = run.labels[-1]
    if later[-2][0].high < 0:
        return f"it still improves at the last checkpoint `{last}`"
    return f"whether it improves before `{last}` is inconclusive"


def readings_of(run: PhaseRun) -> tuple[PhaseReading, ...]:
    """Return the schemes under which learning, a plateau and divergence are all shown."""
    if len(run.thinned) < FEWEST + 1 or not run.is_solid:
        return ()
    level = run.level(run.pairs * (1 + len(run.schemes)))
    readings = (_reading(run, scheme, level) for scheme in run.schemes)
    return tuple(reading for reading in readings if reading is not None)


def _reading(run: PhaseRun, scheme: str, level: float) -> PhaseReading | None:
    """Return the reading with the longest plateau: all pairs hold at once, so none is luck."""
    first, *inner, last = run.thinned
    learned = {k: _both(run, scheme, first, k, level) for k in inner}
    diverged = {k: _both(run, scheme, k, last, level) for k in inner}
    ends = [k for k in inner if diverged[k][1].low > 0 and _is_flat(run, diverged[k][0], k)]
    starts = [k for k in inner if learned[k][0].high < 0 and learned[k][1].high < 0]
    x = run.places.positions
    spans = sorted((x[a] - x[b], a, b) for a in starts for b in ends if a < b)
    for _, plateau, diverging in spans:
        between = _both(run, scheme, plateau, diverging, level)
        if _is_flat(run, between[0], plateau) and _is_less(between[1], diverged[diverging][1]):
            phases = (learned[plateau], between, diverged[diverging])
            loss, error = zip(*phases, strict=True)
            return PhaseReading(scheme, run.labels[plateau], run.labels[diverging], loss, error)
    return None


def _both(run: PhaseRun, scheme: str, a: int, b: int, level: float) -> tuple[Interval, Interval]:
    return run.loss(FULL_PRECISION, a, b, level), run.error(scheme, a, b, level)


def _is_flat(run: PhaseRun, change: Interval, since: int) -> bool:
    margin = BARELY * run.full_loss(since)
    return -margin < change.low and change.high < margin


def _is_less(change: Interval, growth: Interval) -> bool:
    return max(abs(change.low), abs(change.high)) < growth.low
