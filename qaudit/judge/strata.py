"""Errors by stratum: groups of documents that a field of the text names.

All intervals of one subject under one scheme hold at once (Bonferroni over its strata), so that
the largest of them can be read as it is. The worst stratum is named by its estimate; its interval
is that of the largest true value: no stratum is worse than the highest upper bound, and at least
one is as bad as the highest lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.statistics import Array, Statistic
from qaudit.judge.quantities import columns_of
from qaudit.judge.table import Cell, Measurements, divergences
from qaudit.types import FULL_PRECISION, Interval, Measurement, StratumRow

Measure = Literal["relative_error", "absolute_change", "kl"]


@dataclass(frozen=True)
class Worst:
    """The stratum with the largest error, and an interval of the largest of all strata."""

    stratum: str
    interval: Interval
    strata: int  # whose intervals hold at once
    documents: int  # of the worst


def strata_of(measured: Measurement) -> dict[str, npt.NDArray[np.bool_]]:
    """Return which of the scored documents each stratum has; nothing if they are not grouped."""
    if not measured.evidence.strata:
        return {}
    names = np.array(measured.evidence.strata)[measured.evidence.scored()]
    return {str(name): names == name for name in dict.fromkeys(names.tolist())}


def worst_stratum(
    table: Measurements,
    cell: Cell,
    measure: Measure = "relative_error",
    confidence: float | None = None,
) -> Worst | None:
    """Return the worst stratum of a cell; None if nothing is grouped, or the number is missing."""
    measured = table.find(*cell)
    strata = {} if measured is None else strata_of(measured)
    intervals = _by_stratum(table, cell, measure, strata, confidence)
    if not intervals:
        return None
    name = max(intervals, key=lambda name: intervals[name].estimate)
    return Worst(name, largest(intervals.values()), len(strata), int(strata[name].sum()))


def largest(intervals: Iterable[Interval]) -> Interval:
    """Return the interval of the largest of several values whose intervals hold at once."""
    bounds = [(interval.estimate, interval.low, interval.high) for interval in intervals]
    return Interval(*map(max, zip(*bounds, strict=True)))


def stratum_rows(table: Measurements) -> tuple[StratumRow, ...]:
    """Return a row for each subject, scheme and stratum."""
    return tuple(row for cell in table.cells for row in _rows(table, cell))


def _rows(table: Measurements, cell: Cell) -> list[StratumRow]:
    measured = table.draws(*cell)[0]
    strata = strata_of(measured)
    if not strata:
        return []
    tokens = measured.evidence.tokens[measured.evidence.scored()]
    level = statistics.simultaneous(table.confidence, len(strata))
    losses = columns_of(table, [cell])
    errors, changes, fidelity = (
        _by_stratum(table, cell, measure, strata)
        for measure in ("relative_error", "absolute_change", "kl")
    )
    worst = max(errors, key=lambda name: errors[name].estimate, default=None)
    return [
        StratumRow(
            subject=cell[0],
            scheme=cell[1],
            spec=measured.spec,
            stratum=name,
            documents=int(inside.sum()),
            tokens=int(tokens[inside].sum()),
            ce=_interval(losses, statistics.per_token, inside, level),
            relative_error=errors.get(name),
            absolute_change=changes.get(name),
            kl=fidelity.get(name),
            is_worst=name == worst,
        )
        for name, inside in strata.items()
    ]


def _by_stratum(
    table: Measurements,
    cell: Cell,
    measure: Measure,
    strata: dict[str, npt.NDArray[np.bool_]],
    confidence: float | None = None,
) -> dict[str, Interval]:
    """Return a quantity of one cell in each stratum; nothing where it was not measured."""
    if cell[1] == FULL_PRECISION:
        return {}
    # The relative error ignores the last column, which is tokens.
    statistic = statistics.change if measure == "absolute_change" else statistics.excess
    columns = columns_of(table, [cell, (cell[0], FULL_PRECISION)])
    if measure == "kl":
        columns, statistic = columns_of(table, [cell], divergences), statistics.per_token
    if columns is None:
        return {}
    level = table.confidence if confidence is None else confidence
    level = statistics.simultaneous(level, len(strata))
    return {name: _interval(columns, statistic, inside, level) for name, inside in strata.items()}


def _interval(
    columns: tuple[Array, ...] | None,
    statistic: Statistic,
    inside: npt.NDArray[np.bool_],
    level: float,
) -> Interval:
    if columns is None:
        return statistics.UNKNOWN
    return statistics.interval([column[inside] for column in columns], statistic, level)
