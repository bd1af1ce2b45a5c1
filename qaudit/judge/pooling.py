"""Quantities of cells with their intervals over documents, and what else moves them.

A quantity is a function of sums over documents, and its columns are the losses of some subjects
under some schemes (cells), in the function's order. Documents are paired across cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qaudit.core import statistics
from qaudit.core.statistics import MOST_TO_DECIDE, Array, Estimate, Statistic, documents_to_decide
from qaudit.judge.fidelity import scored_tokens, sure_flips, sure_tokens
from qaudit.judge.table import Cell, Measurements, Sums, is_finite, losses
from qaudit.types import FULL_PRECISION, Interval, Measurement, Noise


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
    full, draws, result = table.full(cell[0]), table.draws(*cell), None
    if cell[1] != FULL_PRECISION:
        result = estimated(table, [cell, (cell[0], FULL_PRECISION)], statistics.excess)
    if result is not None and result.spread is None:
        result = None
    return Noise(
        subject=cell[0],
        scheme=cell[1],
        draws=len(draws),
        interval=result.interval if result else None,
        documents=result.spread.standard_error if result and result.spread else None,
        draw=_deviation(draws, full),
        numerical=_part_of_loss(floor, full),
        numerical_nats=floor.nats if floor else None,
        kl_floor=floor.kl if floor else None,
        top1_floor=floor.top1 if floor else None,
    )


def _deviation(draws: Sequence[Measurement], full: Measurement | None) -> float | None:
    """Return the standard deviation of the added loss over draws; None for a single one."""
    if full is None or len(draws) < 2 or not all(map(is_finite, (full, *draws))):
        return None
    totals = [float(m.evidence.nll_sum.sum()) for m in draws]
    return float(np.std(totals, ddof=1)) / float(full.evidence.nll_sum.sum())


def _part_of_loss(moved: Moved | None, full: Measurement | None) -> float | None:
    if moved is None or full is None or not is_finite(full):
        return None
    return moved.nats * float(full.evidence.tokens.sum()) / float(full.evidence.nll_sum.sum())


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
