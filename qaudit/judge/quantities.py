"""Quantities of cells with their intervals over documents, and what else moves them.

A quantity is a function of sums over documents, and its columns are the losses of some subjects
under some schemes (cells), in the function's order. Documents are paired across cells.

How far a stream is from full precision is a mean over tokens, which is a function of sums over
documents, like a loss, or a quantile of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.statistics import (
    MOST_TO_DECIDE,
    Array,
    Estimate,
    Statistic,
    documents_to_decide,
    quantile_interval,
)
from qaudit.judge.table import Cell, Measurements, Sums, divergences, is_finite, losses
from qaudit.types import FULL_PRECISION, SURE, Evidence, Interval, Measurement, Noise

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
    return lambda evidence: scored_tokens(evidence) - MEANS[name].sums(evidence)


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
    shares = {"kl_p50": 0.5, "kl_p90": 0.9, "kl_p99": 0.99, "kl_p999": 0.999}
    by_confidence: dict[str, Any] = {}
    if (sums := evidence.fidelity.by_confidence) is not None:
        tokens_B, kl_B = sums.tokens.sum(axis=0), sums.kl_sum.sum(axis=0)
        pairs = [(float(kl), int(tokens)) for kl, tokens in zip(kl_B, tokens_B, strict=True)]
        by_confidence = {
            "confidence_shares": tuple(tokens / int(tokens_B.sum()) for _, tokens in pairs),
            "confidence_kl": tuple(kl / tokens if tokens else None for kl, tokens in pairs),
        }
    return {
        **columns,
        **{name: quantile_interval(counts_DB, at, confidence) for name, at in shares.items()},
        "kl_max": float(evidence.fidelity.kl_max[used].max()),
        **by_confidence,
    }


def columns_of(
    table: Measurements, cells: Sequence[Cell], sums: Sums = losses
) -> tuple[Array, ...] | None:
    """Return the sums of cells, then tokens; None where one is missing, not finite, or empty."""
    columns = [column_of(table, cell, sums) for cell in cells]
    present = [column for column in columns if column is not None]
    if len(present) < len(columns) or not present:
        return None
    counts = sure_tokens if sums is sure_flips else scored_tokens
    tokens = counts(table.draws(*cells[0])[0].evidence)[table.scored()]
    return (*present, tokens) if tokens.any() else None


def column_of(table: Measurements, cell: Cell, sums: Sums = losses) -> Array | None:
    """Return the sums of a cell's documents; None where one is missing or not finite."""
    measured = table.find(*cell)
    if measured is None:
        return None
    column_D = sums(measured.evidence)
    if not np.isfinite(column_D).all():
        return None
    return column_D[table.scored()].astype(np.float64)


def largest_share(added_D: Array) -> float | None:
    """Return the largest part that a document has of a sum; None where the sum is no gain."""
    total = float(added_D.sum())
    return float(added_D.max()) / total if total > 0 else None


def estimated(
    table: Measurements,
    cells: Sequence[Cell],
    statistic: Statistic,
    *,
    confidence: float | None = None,
    sums: Sums = losses,
) -> Estimate | None:
    """Return a quantity; None where a sum is missing or not finite."""
    columns = columns_of(table, cells, sums)
    if columns is None:
        return None
    level = table.confidence if confidence is None else confidence
    return statistics.estimated(columns, statistic, level)


def interval_of(
    table: Measurements, cells: Sequence[Cell], statistic: Statistic, **how: Any
) -> Interval | None:
    result = estimated(table, cells, statistic, **how)
    return None if result is None else result.interval


def sided(low: Interval | None, high: Interval | None) -> Interval | None:
    """Return an interval with the lower end of one and the upper end of another."""
    return None if low is None or high is None else Interval(low.estimate, low.low, high.high)


@dataclass(frozen=True)
class Moved:
    """How far arithmetic alone moved a measurement, per token; None is not measured."""

    nats: float
    kl: float | None = None
    top1: float | None = None  # the share of tokens


def noise(table: Measurements, floor: Mapping[Cell, Moved]) -> tuple[Noise, ...]:
    """Return what else moves added losses than documents, where it is known.

    `table` has every draw of calibration text, and `floor` how far rounding alone moves a
    measurement. None of it is in an interval.
    """
    drawn = [cell for cell in table.cells if len(table.draws(*cell)) > 1]
    cells = dict.fromkeys((*drawn, *floor))
    return tuple(_noise(table, cell, floor.get(cell)) for cell in cells)


def _noise(table: Measurements, cell: Cell, floor: Moved | None) -> Noise:
    full, draws = table.full(cell[0]), table.draws(*cell)
    result = draw = numerical = None
    if cell[1] != FULL_PRECISION:
        result = estimated(table, [cell, (cell[0], FULL_PRECISION)], statistics.excess)
    if full is not None and is_finite(full):
        loss = float(full.evidence.nll_sum.sum())
        if len(draws) > 1 and all(map(is_finite, draws)):
            totals = [float(m.evidence.nll_sum.sum()) for m in draws]
            draw = float(np.std(totals, ddof=1)) / loss  # of the added loss
        if floor:
            numerical = floor.nats * float(full.evidence.tokens.sum()) / loss
    return Noise(
        subject=cell[0],
        scheme=cell[1],
        draws=len(draws),
        interval=result.interval if result and result.spread else None,
        documents=result.spread.standard_error if result and result.spread else None,
        draw=draw,
        numerical=numerical,
        numerical_nats=floor.nats if floor else None,
        kl_floor=floor.kl if floor else None,
        top1_floor=floor.top1 if floor else None,
    )


@dataclass(frozen=True)
class Deciding:
    """What would decide, in a sentence; the documents where more of them do."""

    hint: str
    documents: int | None = None


AT_THE_MARGIN = Deciding(
    f"at the margin: {MOST_TO_DECIDE:,} documents would not decide it in four of five cases"
)


def settling(
    table: Measurements,
    cells: Sequence[Cell],
    statistic: Statistic,
    margin: float = 0.0,
    interval: Interval | None = None,
    sums: Sums = losses,
) -> Deciding:
    """Return how many documents decide on which side of a margin a quantity is.

    `interval` is that which is held against the margin; by default the plain one.
    """
    result = estimated(table, cells, statistic, sums=sums)
    if result is None or result.spread is None:
        return Deciding("")
    error = result.spread.standard_error
    needed = documents_to_decide(interval or result.interval, error, table.documents, margin)
    return deciding(needed, table.documents)


def deciding(needed: int | None, measured: int) -> Deciding:
    if needed is None:
        return AT_THE_MARGIN
    hint = f"needs about {needed:,} documents to decide; {measured:,} were measured"
    return Deciding(hint, needed)
