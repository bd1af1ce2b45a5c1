"""Correlations of a relative error with tokens, the learning rate, and measured quantities.

One run is one observation of everything that changes along it, so nothing here is about causes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from qaudit.core import statistics
from qaudit.core.statistics import Array
from qaudit.diagnostics.phases import association
from qaudit.diagnostics.phases.judge.pairs import Run
from qaudit.judge.pooling import estimated
from qaudit.types import FULL_PRECISION, CorrelationRow, Interval

MINIMUM_POINTS = 5
"""Fewer differences have an interval from -1 to 1, whatever they are."""


def correlations_of(
    run: Run, traits: Mapping[str, Mapping[str, float]]
) -> tuple[CorrelationRow, ...]:
    """Return a row for every scheme and quantity."""
    if not run.is_solid:
        return ()
    quantities = dict(_quantities(run, traits))
    return tuple(
        _row(run, scheme, name, values)
        for scheme in run.schemes
        for name, values in quantities.items()
    )


def _quantities(
    run: Run, traits: Mapping[str, Mapping[str, float]]
) -> Iterator[tuple[str, Mapping[str, float]]]:
    yield run.places.unit, dict(zip(run.labels, run.places.positions, strict=True))
    rates = {c.label: c.learning_rate for c in run.checkpoints if c.learning_rate is not None}
    if rates:
        yield "learning rate", rates
    for name, values in traits.items():
        known = {label: values[label] for label in run.labels if label in values}
        if known:
            yield name, known


def _row(run: Run, scheme: str, name: str, values: Mapping[str, float]) -> CorrelationRow:
    which = [k for k, label in enumerate(run.labels) if label in values]
    if len(which) < MINIMUM_POINTS:
        reason = f"known at {len(which)} checkpoints; it takes {MINIMUM_POINTS}"
        return CorrelationRow(scheme, name, len(which), reason=reason)
    error_N = np.array([_error(run, scheme, run.labels[k]) for k in which])
    other_N = np.array([values[run.labels[k]] for k in which])
    correlation = association.spearman(error_N, other_N)
    if correlation is None:
        return CorrelationRow(scheme, name, len(which), reason="it is the same at all of them")
    confidence = run.table.confidence
    points = association.effective_points(error_N, other_N)
    place = name == run.places.unit  # its differences only reflect when checkpoints were saved
    steps = np.diff(error_N), np.diff(other_N)
    moved = None if place else association.spearman(*steps)
    return CorrelationRow(
        scheme=scheme,
        quantity=name,
        points=len(which),
        effective_points=points,
        ranks=association.around(correlation, points, confidence),
        differences=None if moved is None else association.around(moved, len(steps[0]), confidence),
        probability=association.probability(*steps),
        at_equal_tokens=None
        if name == run.places.unit
        else _at_equal_places(run, which, error_N, other_N, points),
    )


def _at_equal_places(
    run: Run, which: list[int], error_N: Array, other_N: Array, points: float
) -> Interval | None:
    at_N = np.array([run.places.positions[k] for k in which])
    correlation = association.partial(error_N, other_N, at_N)
    if correlation is None:
        return None
    return association.around(correlation, points, run.table.confidence, taken_out=1)


def _error(run: Run, scheme: str, label: str) -> float:
    cells = [(label, scheme), (label, FULL_PRECISION)]
    found = estimated(run.table, cells, statistics.excess)
    return found.interval.estimate if found else float("nan")
