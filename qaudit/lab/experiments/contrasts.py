"""What an experiment's contrasts show: per seed over documents, and over seeds.

Within a seed two models are compared on the same documents, as an audit does it, and the interval
tells how far that comparison can be trusted for these two models. It tells nothing of what
another initialization and another order of data would have given. That is what seeds are for:
the interval over seeds is Student's t on one number per seed, and it is wide with few of them
because few seeds say little. A claim about training stands or falls with that interval; with a
single seed nothing is claimed. Given up: a mixed model over seeds and documents, which needs
more seeds than a laptop trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from qaudit.core import statistics
from qaudit.core.replicates import over_repetitions
from qaudit.core.statistics import Statistic
from qaudit.types import (
    FULL_PRECISION,
    Contrast,
    ContrastResult,
    Evidence,
    Interval,
    SeedEstimate,
    SeedPoint,
    Standing,
)

Found = Mapping[tuple[str, str], Evidence]
"""Per-document sums by subject and scheme, of one seed."""


def estimate(contrast: Contrast, found: Found, confidence: float) -> Interval | None:
    """Return `a` minus `b` over the documents of one seed, or nothing where it is not measured."""
    a, b = contrast.a, contrast.b
    columns: list[tuple[str, str]] = [(a, contrast.scheme), (b, contrast.scheme)]
    statistic: Statistic = statistics.change
    if contrast.measure != "loss":
        columns = [(s, q) for s in (a, b) for q in (contrast.scheme, FULL_PRECISION)]
        statistic = statistics.excess_difference
    if contrast.measure == "lost":
        statistic = statistics.change_difference
    if any(column not in found for column in columns):
        return None
    used = found[columns[0]].scored()
    sums = [found[column].nll_sum[used] for column in columns]
    if not all(np.isfinite(column).all() for column in sums):
        return None
    if contrast.measure != "error":
        sums.append(found[columns[0]].tokens[used].astype(np.float64))
    whole = statistics.interval(tuple(sums), statistic, confidence)
    return whole if math.isfinite(whole.estimate) else None


def standing(contrast: Contrast, measured: int, found: Interval | None) -> Standing:
    """Hold what seeds show against what a study leads one to expect."""
    if measured == 0:
        return "not measured"
    if contrast.expect is None:
        return "open"
    if found is None:
        return "inconclusive"
    if contrast.expect == "near":
        if -contrast.margin < found.low and found.high < contrast.margin:
            return "agrees"
        outside = found.low > contrast.margin or found.high < -contrast.margin
        return "disagrees" if outside else "inconclusive"
    sign = 1 if contrast.expect == "higher" else -1
    low, high = sorted((sign * found.low, sign * found.high))
    return "agrees" if low > 0 else "disagrees" if high < 0 else "inconclusive"


def result_of(contrast: Contrast, seeds: Mapping[int, Found], confidence: float) -> ContrastResult:
    """Return a contrast in every seed that has it, and over them."""
    found = [
        SeedEstimate(seed, interval)
        for seed, evidence in seeds.items()
        if (interval := estimate(contrast, evidence, confidence)) is not None
    ]
    whole = over_repetitions([one.interval.estimate for one in found], confidence)
    return ContrastResult(contrast, tuple(found), whole, standing(contrast, len(found), whole))


def points_of(seed: int, found: Found, confidence: float) -> tuple[SeedPoint, ...]:
    """Return every model of a seed under every scheme that it was measured with."""
    points = []
    for (subject, scheme), evidence in found.items():
        full = found.get((subject, FULL_PRECISION))
        if scheme == FULL_PRECISION or full is None:
            continue
        used = evidence.scored()
        tokens = float(evidence.tokens[used].sum())
        pair = evidence.nll_sum[used], full.nll_sum[used]
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
