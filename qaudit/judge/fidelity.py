"""How far a stream is from full precision: means with intervals, and quantiles of tokens.

Each mean is a function of sums over documents, like a loss, so that draws are pooled and
intervals made by the same routines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.histogram import quantile_interval
from qaudit.core.statistics import Array, Statistic
from qaudit.types import Evidence, Fidelity, Interval

Mean = Literal["kl", "top1_agreement", "rms_dp"]


@dataclass(frozen=True)
class FidelityMeasure:
    """A mean over tokens: what is summed over documents, what it becomes, and its bounds."""

    sums: Callable[[Fidelity], npt.NDArray[np.generic]]
    statistic: Statistic
    highest: float

    def columns(
        self, evidence: Evidence, scored: npt.NDArray[np.bool_]
    ) -> tuple[Array, Array] | None:
        """Return (sums, tokens) of the documents that are marked; None where none were recorded."""
        if evidence.fidelity is None:
            return None
        sums_D = self.sums(evidence.fidelity)[scored].astype(np.float64)
        return sums_D, evidence.tokens[scored].astype(np.float64)

    def bounded(self, interval: Interval) -> Interval:
        return statistics.within(interval, 0.0, self.highest)


MEANS: dict[Mean, FidelityMeasure] = {
    "kl": FidelityMeasure(lambda one: one.kl_sum, statistics.per_token, math.inf),
    "top1_agreement": FidelityMeasure(lambda one: one.same_top, statistics.per_token, 1.0),
    "rms_dp": FidelityMeasure(lambda one: one.squared_dp_sum, statistics.root_mean, 1.0),
}


def mean_of(
    evidence: Evidence, name: Mean, confidence: float, split: str | None = None
) -> Interval | None:
    """Return a mean with its interval over documents; None where nothing was compared."""
    measure = MEANS[name]
    columns = measure.columns(evidence, evidence.scored(split))
    if columns is None or not columns[1].sum():
        return None
    return measure.bounded(statistics.interval(columns, measure.statistic, confidence))


def disagreements(evidence: Evidence) -> Array:
    """Return the tokens of each document whose likeliest token is another; NaN if not measured."""
    fidelity = evidence.fidelity
    tokens = evidence.tokens.astype(np.float64)
    return tokens - fidelity.same_top if fidelity else np.full(len(tokens), np.nan)


def squared_changes(evidence: Evidence) -> Array:
    """Return each document's sum of squared changes of probability; NaN if not measured."""
    fidelity = evidence.fidelity
    return fidelity.squared_dp_sum if fidelity else np.full(len(evidence.tokens), np.nan)


def fidelity_columns(evidence: Evidence, confidence: float) -> dict[str, Any]:
    """Return the columns of a measurement, as far as it was compared with full precision."""
    kl, top1, rms = (mean_of(evidence, name, confidence) for name in MEANS)
    used = evidence.scored()
    if evidence.fidelity is None or kl is None or top1 is None or rms is None:
        return {}
    counts_DB = evidence.fidelity.kl_counts[used]
    p50, p90, p99, p999 = (
        quantile_interval(counts_DB, share, confidence) for share in (0.5, 0.9, 0.99, 0.999)
    )
    return {
        "kl": kl,
        "top1_agreement": top1,
        "rms_dp": rms,
        "kl_p50": p50,
        "kl_p90": p90,
        "kl_p99": p99,
        "kl_p999": p999,
        "kl_max": float(evidence.fidelity.kl_max[used].max()),
    }
