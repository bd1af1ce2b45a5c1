"""Correlations of a relative error with tokens, the learning rate, and measured quantities.

Spearman's correlation of ranks, three times, because points of one run are no independent draws:

- of the ranks themselves, with an interval for as many points as are independent: for two
  series with first autocorrelations r and s, n (1 - r s) / (1 + r s) (Bartlett 1946), each
  corrected for what few points hide (Marriott and Pope 1954). Two quantities that both only rise
  are left with a point or two, and then the interval is from -1 to 1.
- of the differences from one point to the next, which have lost the common drift, with its
  probability: by all permutations of up to eight, by Student's t above.
- of the ranks with a third quantity's taken out (a partial correlation), which costs one point.

Intervals are Fisher's, with Bonett and Wright's (2000) standard error for ranks and Student's
quantile in place of the normal one, for few points are few. Given up: the bootstrap, which draws
ties from few points and covers less than its level.

One run is one observation of everything that changes along it: nothing here is about causes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import permutations

import numpy as np
import numpy.typing as npt
import scipy  # its parts load where they are first used

from qaudit.core import statistics
from qaudit.core.statistics import Array
from qaudit.diagnostics.phases.judge.run import PhaseRun
from qaudit.judge.pooling import estimated
from qaudit.types import FULL_PRECISION, CorrelationRow, Interval

Traits = Mapping[str, Mapping[str, float]]
"""Quantity -> checkpoint -> value: what diagnostics measured of whole models."""

MINIMUM_POINTS = 5
"""Fewer differences have an interval from -1 to 1, whatever they are."""

EXACT = 8
"""Up to so many differences every permutation is tried: 40,320."""

LEAST = 4.0
"""With fewer independent points the interval is from -1 to 1."""


def correlations_of(run: PhaseRun, traits: Traits) -> tuple[CorrelationRow, ...]:
    if not run.is_solid:
        return ()
    quantities = dict(_quantities(run, traits))
    return tuple(
        _row(run, scheme, name, values)
        for scheme in run.schemes
        for name, values in quantities.items()
    )


def _quantities(run: PhaseRun, traits: Traits) -> Iterator[tuple[str, Mapping[str, float]]]:
    yield run.places.unit, dict(zip(run.labels, run.places.positions, strict=True))
    rates = {c.label: c.learning_rate for c in run.checkpoints if c.learning_rate is not None}
    if rates:
        yield "learning rate", rates
    for name, values in traits.items():
        measured = {label: values[label] for label in run.labels if label in values}
        if measured:
            yield name, measured


def _row(run: PhaseRun, scheme: str, name: str, values: Mapping[str, float]) -> CorrelationRow:
    which = [k for k, label in enumerate(run.labels) if label in values]
    if len(which) < MINIMUM_POINTS:
        reason = f"known at {len(which)} checkpoints; it takes {MINIMUM_POINTS}"
        return CorrelationRow(scheme, name, len(which), reason=reason)
    error_N = np.array([_error(run, scheme, run.labels[k]) for k in which])
    other_N = np.array([values[run.labels[k]] for k in which])
    correlation = spearman(error_N, other_N)
    if correlation is None:
        return CorrelationRow(scheme, name, len(which), reason="it is the same at all of them")
    confidence = run.table.confidence
    points = effective_points(error_N, other_N)
    place = name == run.places.unit  # its differences only reflect when checkpoints were saved
    steps = np.diff(error_N), np.diff(other_N)
    of_steps = None if place else spearman(*steps)
    return CorrelationRow(
        scheme=scheme,
        quantity=name,
        points=len(which),
        effective_points=points,
        ranks=around(correlation, points, confidence),
        differences=None if of_steps is None else around(of_steps, len(steps[0]), confidence),
        probability=probability(*steps),
        at_equal_tokens=None if place else _at_equal_places(run, which, error_N, other_N, points),
    )


def _at_equal_places(
    run: PhaseRun, which: list[int], error_N: Array, other_N: Array, points: float
) -> Interval | None:
    at_N = np.array([run.places.positions[k] for k in which])
    correlation = partial(error_N, other_N, at_N)
    if correlation is None:
        return None
    return around(correlation, points, run.table.confidence, taken_out=1)


def _error(run: PhaseRun, scheme: str, label: str) -> float:
    cells = [(label, scheme), (label, FULL_PRECISION)]
    error = estimated(run.table, cells, statistics.excess)
    return error.interval.estimate if error else float("nan")


def ranks_of(values: npt.ArrayLike) -> Array:
    """Return ranks, equal values sharing theirs."""
    ranks: Array = scipy.stats.rankdata(np.asarray(values, dtype=np.float64))
    return ranks


def spearman(a: npt.ArrayLike, b: npt.ArrayLike) -> float | None:
    """Return the correlation of ranks; None where one of the two never changes."""
    return _pearson(ranks_of(a), ranks_of(b))


def _pearson(a: Array, b: Array) -> float | None:
    left, right = a - a.mean(), b - b.mean()
    size = math.sqrt(float(left @ left) * float(right @ right))
    return max(-1.0, min(1.0, float(left @ right) / size)) if size > 0 else None


def effective_points(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Return how many independent points two autocorrelated series are worth, by their ranks."""
    both = _autocorrelation(ranks_of(a)) * _autocorrelation(ranks_of(b))
    points = len(np.asarray(a))
    return float(max(1.0, points * (1 - both) / (1 + both)))


def _autocorrelation(ranks_N: Array) -> float:
    """Return the first autocorrelation, what few points hide of it added, from 0 to nearly 1."""
    apart_N, n = ranks_N - ranks_N.mean(), len(ranks_N)
    size = float(apart_N @ apart_N)
    if size <= 0 or n < 5:
        return 0.0
    lag_one = float(apart_N[1:] @ apart_N[:-1]) / size
    return min(0.999, max(0.0, (n * lag_one + 1) / (n - 4)))


def around(
    estimate: float, points: float, confidence: float = 0.95, *, taken_out: int = 0
) -> Interval:
    freedom = points - taken_out
    if freedom < LEAST:
        return Interval(estimate, -1.0, 1.0)
    error = math.sqrt((1 + estimate**2 / 2) / (freedom - 3))
    half = float(scipy.special.stdtrit(freedom - 2, 0.5 + confidence / 2)) * error
    middle = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, estimate)))
    low, high = math.tanh(middle - half), math.tanh(middle + half)
    return Interval(estimate, min(estimate, low), max(estimate, high))


def partial(a: npt.ArrayLike, b: npt.ArrayLike, third: npt.ArrayLike) -> float | None:
    """Return the correlation of ranks with what goes along with a third quantity taken out."""
    x, y, z = ranks_of(a), ranks_of(b), ranks_of(third)
    z = z - z.mean()
    size = float(z @ z)
    if size <= 0:
        return None
    left, right = (v - v.mean() - z * (float((v - v.mean()) @ z) / size) for v in (x, y))
    tiny = 1e-9 * size
    return None if min(float(left @ left), float(right @ right)) < tiny else _pearson(left, right)


def probability(a: npt.ArrayLike, b: npt.ArrayLike) -> float | None:
    """Return how probable so strong a correlation is among independent pairs, of either sign."""
    correlation, n = spearman(a, b), len(np.asarray(a))
    if correlation is None or n < 3:
        return None
    if n > EXACT:
        freedom = n - 2
        t = abs(correlation) * math.sqrt(freedom / max(1e-300, 1 - correlation**2))
        return float(2 * scipy.special.stdtr(freedom, -t))
    left, right = ranks_of(a), ranks_of(b)
    orders_PN = np.array(list(permutations(range(n))))
    products_P = right[orders_PN] @ (left - left.mean())
    slope = abs(float(right @ (left - left.mean())))
    return float((np.abs(products_P) >= slope - 1e-9).mean())
