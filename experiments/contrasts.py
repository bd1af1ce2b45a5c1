"""The contrasts of an experiment: per seed over documents, and over seeds; their summary.

Within a seed two models are compared on the same documents, as an audit does it, and the interval
bounds that comparison of these two models. Another initialization and data order would give other
models; that is why there are seeds: the interval over seeds is Student's t on one number per seed,
wide with few of them. A claim about training is judged by that interval; a single seed decides
nothing. Not attempted: a mixed model over seeds and documents, which needs more seeds than a
laptop trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy

from experiments.table import (
    Contrast,
    ContrastResult,
    SeedEstimate,
    SeedPoint,
    Standing,
)
from qaudit.core import statistics
from qaudit.core.statistics import Array, Statistic
from qaudit.types import FULL_PRECISION, Evidence, Interval


@dataclass(frozen=True)
class MeasuredSeed:
    """What was measured of one seed."""

    evidence: Mapping[tuple[str, str], Evidence]  # per-document sums by subject and scheme
    traces: Mapping[str, Interval] = field(default_factory=dict)  # of the Hessian, by subject


def estimate(contrast: Contrast, seed: MeasuredSeed, confidence: float) -> Interval | None:
    a, b, evidence = contrast.a, contrast.b, seed.evidence
    if contrast.measure == "trace":
        return log_ratio(seed.traces.get(a), seed.traces.get(b))
    columns: list[tuple[str, str]] = [(a, contrast.scheme), (b, contrast.scheme)]
    statistic: Statistic = statistics.change
    if contrast.measure in ("error", "lost"):
        columns = [(s, q) for s in (a, b) for q in (contrast.scheme, FULL_PRECISION)]
        statistic = statistics.excess_difference
    if contrast.measure == "lost":
        statistic = statistics.change_difference
    if any(column not in evidence for column in columns):
        return None
    used = evidence[columns[0]].scored()
    sums = [_sums(evidence[column], contrast)[used] for column in columns]
    if not all(np.isfinite(column).all() for column in sums):
        return None
    if contrast.measure != "error":
        sums.append(evidence[columns[0]].tokens[used].astype(np.float64))
    interval = statistics.interval(tuple(sums), statistic, confidence)
    return interval if math.isfinite(interval.estimate) else None


def _sums(evidence: Evidence, contrast: Contrast) -> Array:
    if contrast.measure != "kl":
        return evidence.nll_sum
    fidelity = evidence.fidelity
    return np.full_like(evidence.nll_sum, np.nan) if fidelity is None else fidelity.kl_sum


def log_ratio(a: Interval | None, b: Interval | None) -> Interval | None:
    """Return the logarithm of a/b; each is as uncertain as it is by itself, on other documents."""
    if a is None or b is None or min(a.low, b.low) <= 0:
        return None
    middle = math.log(a.estimate / b.estimate)
    below = math.hypot(math.log(a.estimate / a.low), math.log(b.high / b.estimate))
    above = math.hypot(math.log(a.high / a.estimate), math.log(b.estimate / b.low))
    return Interval(middle, middle - below, middle + above)


def standing(
    contrast: Contrast, measured: int, interval: Interval | None, errors: Sequence[float] = ()
) -> Standing:
    """Compare the interval over seeds with what a study suggests.

    `errors` are the relative errors that are compared: a margin that is larger decides nothing.
    """
    if measured == 0:
        return "not measured"
    if contrast.expect is None:
        return "open"
    if interval is None:
        return "inconclusive"
    if contrast.expect == "near":
        if contrast.measure == "error" and errors and max(map(abs, errors)) < contrast.margin:
            return "too wide"
        if -contrast.margin < interval.low and interval.high < contrast.margin:
            return "agrees"
        outside = interval.low > contrast.margin or interval.high < -contrast.margin
        return "disagrees" if outside else "inconclusive"
    sign = 1 if contrast.expect == "higher" else -1
    low, high = sorted((sign * interval.low, sign * interval.high))
    return "agrees" if low > 0 else "disagrees" if high < 0 else "inconclusive"


def over_repetitions(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Return the mean of independent repetitions with Student's t interval; None for one alone.

    With few of them, as seeds of a training run are, the quantile is large (4.3 for three, at
    95 %), and that is the honest price of few. Bootstrap and normal intervals are given up: with
    three numbers the first has ten distinct samples, and the second covers 81 %.
    """
    if len(values) < 2:
        return None
    numbers = np.asarray(values, dtype=np.float64)
    mean, n = float(numbers.mean()), len(numbers)
    quantile = float(scipy.special.stdtrit(n - 1, 0.5 + confidence / 2))
    half = quantile * float(numbers.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def result_of(
    contrast: Contrast, seeds: Mapping[int, MeasuredSeed], confidence: float
) -> ContrastResult:
    """Return a contrast in every seed that has it, and over them."""
    estimates = [
        SeedEstimate(seed, interval)
        for seed, of_seed in seeds.items()
        if (interval := estimate(contrast, of_seed, confidence)) is not None
    ]
    over_seeds = over_repetitions(
        [estimate.interval.estimate for estimate in estimates], confidence
    )
    points = [p for seed in seeds for p in points_of(seed, seeds[seed], confidence)]
    verdict = standing(contrast, len(estimates), over_seeds, errors_of(contrast, points))
    return ContrastResult(contrast, tuple(estimates), over_seeds, verdict)


def errors_of(contrast: Contrast, points: Sequence[SeedPoint]) -> tuple[float, ...]:
    pair = (contrast.a, contrast.b)
    return tuple(
        p.interval.estimate for p in points if p.scheme == contrast.scheme and p.subject in pair
    )


def points_of(seed: int, measured: MeasuredSeed, confidence: float) -> tuple[SeedPoint, ...]:
    points = []
    for (subject, scheme), quantized in measured.evidence.items():
        full = measured.evidence.get((subject, FULL_PRECISION))
        if scheme == FULL_PRECISION or full is None:
            continue
        used = quantized.scored()
        tokens = float(quantized.tokens[used].sum())
        pair = quantized.nll_sum[used], full.nll_sum[used]
        points.append(
            SeedPoint(
                seed=seed,
                subject=subject,
                scheme=scheme,
                loss=float(pair[1].sum()) / tokens,
                quantized=float(pair[0].sum()) / tokens,
                interval=statistics.relative_error(*pair, confidence),
            )
        )
    return tuple(points)
