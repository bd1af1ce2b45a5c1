"""How far a stream is from full precision: means with intervals, and quantiles of tokens.

Each mean is a function of sums over documents, like a loss, so that draws are pooled and
intervals made by the same routines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.statistics import Array, Statistic, quantile_interval
from qaudit.judge.table import divergences
from qaudit.types import SURE, ByConfidence, Evidence, Interval, Measurement

Mean = Literal[
    "kl", "top1_agreement", "sure_flips", "rms_dp", "output_error", "routing_agreement",
    "routing_moved",
]  # fmt: skip


def scored_tokens(evidence: Evidence) -> Array:
    return evidence.tokens.astype(np.float64)


def _known(of: Callable[[Evidence], npt.NDArray[Any] | None]) -> Callable[[Evidence], Array]:
    """Return a function to sums over the tokens of each document; NaN where none were recorded."""

    def sums(evidence: Evidence) -> Array:
        sums_D = of(evidence)
        return (
            np.full(len(evidence.tokens), np.nan) if sums_D is None else sums_D.astype(np.float64)
        )

    return sums


def _sure(name: str, evidence: Evidence) -> npt.NDArray[np.int64] | None:
    """Return sums over the tokens of which full precision is sure."""
    sums = evidence.fidelity.by_confidence if evidence.fidelity else None
    return None if sums is None else getattr(sums, name)[:, SURE:].sum(axis=1)


sure_flips, sure_tokens = (_known(partial(_sure, name)) for name in ("flips", "tokens"))


@dataclass(frozen=True)
class FidelityMeasure:
    """A mean over tokens: what is summed over documents, what it becomes, and its bounds."""

    sums: Callable[[Evidence], Array]  # NaN where nothing was recorded
    statistic: Statistic
    highest: float
    counts: Callable[[Evidence], Array] = scored_tokens  # of the tokens that the mean is over

    def columns(
        self, evidence: Evidence, scored: npt.NDArray[np.bool_]
    ) -> tuple[Array, Array] | None:
        """Return (sums, tokens) of the documents that are marked; None where none were recorded."""
        sums_D = self.sums(evidence)[scored]
        if not np.isfinite(sums_D).all():
            return None
        return sums_D, self.counts(evidence)[scored]

    def bounded(self, interval: Interval) -> Interval:
        return statistics.within(interval, 0.0, self.highest)


def _of_fidelity(name: str) -> Callable[[Evidence], Array]:
    return _known(lambda evidence: getattr(evidence.fidelity, name, None))


def _of_routing(name: str) -> Callable[[Evidence], Array]:
    def mean(evidence: Evidence) -> Array | None:
        layers_LD = getattr(evidence.routing, name, None)
        return None if layers_LD is None else layers_LD.mean(axis=0, dtype=np.float64)

    return _known(mean)


MEANS: dict[Mean, FidelityMeasure] = {
    "kl": FidelityMeasure(divergences, statistics.per_token, math.inf),
    "top1_agreement": FidelityMeasure(_of_fidelity("same_top"), statistics.per_token, 1.0),
    "sure_flips": FidelityMeasure(sure_flips, statistics.per_token, 1.0, sure_tokens),
    "rms_dp": FidelityMeasure(_of_fidelity("squared_dp_sum"), statistics.root_mean, 1.0),
    "output_error": FidelityMeasure(
        _known(lambda evidence: evidence.output_error), statistics.per_token, math.inf
    ),
    "routing_agreement": FidelityMeasure(_of_routing("same"), statistics.per_token, 1.0),
    "routing_moved": FidelityMeasure(_of_routing("moved"), statistics.per_token, 1.0),
}


def mean_of(evidence: Evidence, name: Mean, confidence: float) -> Interval | None:
    """Return a mean with its interval over documents; None where nothing was compared."""
    measure = MEANS[name]
    columns = measure.columns(evidence, evidence.scored())
    if columns is None or not columns[1].sum():
        return None
    return measure.bounded(statistics.interval(columns, measure.statistic, confidence))


def agreement_of(other: Interval) -> Interval:
    """Return the agreement, from the disagreement, which draws move in proportion to itself."""
    return statistics.within(Interval(1 - other.estimate, 1 - other.high, 1 - other.low), 0.0, 1.0)


def _others(name: Mean) -> Callable[[Evidence], Array]:
    """Return a function to the tokens of each document that a mean does not count."""
    return lambda evidence: evidence.tokens.astype(np.float64) - MEANS[name].sums(evidence)


disagreements, reroutings = _others("top1_agreement"), _others("routing_agreement")


def reference_columns(measured: Measurement, reference: str, confidence: float) -> dict[str, Any]:
    """Return the columns of a measurement, as far as it was compared with the reference.

    The reference itself is compared with its own full precision.
    """
    evidence = measured.evidence
    if measured.subject != reference:
        evidence = replace(evidence, fidelity=evidence.reference)
    return {
        "reference_kl": mean_of(evidence, "kl", confidence),
        "reference_top1_agreement": mean_of(evidence, "top1_agreement", confidence),
    }


def fidelity_columns(evidence: Evidence, confidence: float) -> dict[str, Any]:
    """Return the columns of a measurement, as far as it was compared with full precision."""
    means = ((name, mean_of(evidence, name, confidence)) for name in MEANS)
    columns: dict[str, Any] = {name: mean for name, mean in means if mean is not None}
    used = evidence.scored()
    if evidence.fidelity is None or "kl" not in columns:
        return columns
    counts_DB = evidence.fidelity.kl_counts[used]
    p50, p90, p99, p999 = (
        quantile_interval(counts_DB, share, confidence) for share in (0.5, 0.9, 0.99, 0.999)
    )
    return {
        **columns,
        "kl_p50": p50,
        "kl_p90": p90,
        "kl_p99": p99,
        "kl_p999": p999,
        "kl_max": float(evidence.fidelity.kl_max[used].max()),
        **_confidence_columns(evidence.fidelity.by_confidence),
    }


def _confidence_columns(sums: ByConfidence | None) -> dict[str, Any]:
    if sums is None:
        return {}
    tokens_B, kl_B = sums.tokens.sum(axis=0), sums.kl_sum.sum(axis=0)
    pairs = [(float(kl), int(tokens)) for kl, tokens in zip(kl_B, tokens_B, strict=True)]
    return {
        "confidence_shares": tuple(tokens / int(tokens_B.sum()) for _, tokens in pairs),
        "confidence_kl": tuple(kl / tokens if tokens else None for kl, tokens in pairs),
    }
