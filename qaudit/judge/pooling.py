"""Intervals over documents and over draws of calibration text.

A quantity is a function of sums over documents, and its columns are the losses of some subjects
under some schemes (cells), in the function's order. Documents are paired across cells; draws are
not, for those of two cells are independent (`judge.draw_noise`). Where nothing was drawn twice,
everything here is the interval over documents that `core.statistics` gives, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.draws import DrawNoise, Pooled, pooled
from qaudit.core.power import MOST_TO_DECIDE, documents_to_decide
from qaudit.core.statistics import Array, Statistic
from qaudit.judge.draw_noise import column_of, noise_in, noise_of
from qaudit.judge.fidelity import (
    MEANS,
    Mean,
    agreement_of,
    disagreements,
    reroutings,
    scored_tokens,
    sure_flips,
    sure_tokens,
)
from qaudit.judge.table import Cell, Measurements, Sums, is_finite, losses
from qaudit.types import (
    FULL_PRECISION,
    ClaimKind,
    Interval,
    Measurement,
    MeasurementRow,
    Noise,
    PooledRow,
)


@dataclass(frozen=True, eq=False)
class Columns:
    """The sums of cells, (draws, documents) each, then tokens; and the noise of each one's draw."""

    sums: tuple[Array, ...]
    noises: tuple[DrawNoise | None, ...]

    @property
    def draws(self) -> int:
        """The fewest draws of a cell whose draw is known to have noise."""
        pairs = zip(self.sums, self.noises, strict=True)
        return min((len(column) for column, noise in pairs if noise is not None), default=1)

    def pooled(
        self, statistic: Statistic, confidence: float, inside: npt.NDArray[np.bool_] | None = None
    ) -> Pooled:
        """Return a quantity of these columns, or of some of their documents."""
        sums = self.sums if inside is None else [column[..., inside] for column in self.sums]
        return pooled(sums, statistic, confidence, self.noises)

    @property
    def means(self) -> tuple[Array, ...]:
        return tuple(np.atleast_2d(column).mean(axis=0) for column in self.sums)


def columns_of(
    table: Measurements, cells: Sequence[Cell], split: str | None = None, sums: Sums = losses
) -> Columns | None:
    """Return the columns of cells; None where a sum is missing, not finite, or over no token."""
    columns = [column_of(table, cell, split, sums) for cell in cells]
    present = [column for column in columns if column is not None]
    if len(present) < len(columns) or not present:
        return None
    counts = sure_tokens if sums is sure_flips else scored_tokens
    tokens = counts(table.draws(*cells[0])[0].evidence)[table.scored(split)]
    if not tokens.any():
        return None
    noises = [noise_of(table, cell, split, sums) for cell in cells]
    return Columns((*present, tokens), (*map(noise_in, noises), None))


def estimated(
    table: Measurements,
    cells: Sequence[Cell],
    statistic: Statistic,
    *,
    split: str | None = None,
    confidence: float | None = None,
    sums: Sums = losses,
) -> Pooled | None:
    """Return a quantity over all draws; None where a sum is missing or not finite."""
    columns = columns_of(table, cells, split, sums)
    if columns is None:
        return None
    level = table.confidence if confidence is None else confidence
    return columns.pooled(statistic, level)


def interval_of(
    table: Measurements, cells: Sequence[Cell], statistic: Statistic, **how: Any
) -> Interval | None:
    result = estimated(table, cells, statistic, **how)
    return None if result is None else result.interval


def pooled_scores(table: Measurements) -> tuple[PooledRow, ...]:
    """Return a row for every subject and scheme whose intervals include the calibration draw.

    That is each that calibrates, where any was drawn several times: the row is what decides.
    """
    drawn = set(_drawn(table))
    return tuple(
        _pooled_score(table, cell)
        for cell in table.cells
        if cell in drawn or noise_of(table, cell) is not None
    )


def _drawn(table: Measurements) -> list[Cell]:
    return [cell for cell in table.cells if len(table.draws(*cell)) > 1]


def _pooled_score(table: Measurements, cell: Cell) -> PooledRow:
    draws = table.draws(*cell)
    full = (cell[0], FULL_PRECISION)
    ce = interval_of(table, [cell], statistics.per_token) or statistics.UNKNOWN
    nbytes = int(draws[0].evidence.nbytes.sum())
    nll = float(np.mean([m.evidence.nll_sum.sum() for m in draws]))
    is_measured = nbytes > 0 and ce != statistics.UNKNOWN
    noise = noise_of(table, cell)
    return PooledRow(
        subject=cell[0],
        scheme=cell[1],
        spec=draws[0].spec,
        draws=len(draws),
        ce=ce,
        relative_error=interval_of(table, [cell, full], statistics.excess),
        absolute_change=interval_of(table, [cell, full], statistics.change),
        perplexity=statistics.perplexity(ce.estimate),
        bits_per_byte=statistics.bits_per_byte(nll, nbytes) if is_measured else None,
        kl=_fidelity(table, cell, "kl"),
        top1_agreement=_agreement(table, cell, disagreements),
        rms_dp=_fidelity(table, cell, "rms_dp"),
        sure_flips=_fidelity(table, cell, "sure_flips"),
        routing_agreement=_agreement(table, cell, reroutings),
        routing_moved=_fidelity(table, cell, "routing_moved"),
        draw_noise=noise.source if noise else None,
    )


def _fidelity(table: Measurements, cell: Cell, name: Mean) -> Interval | None:
    """Return a mean over tokens of how far predictions are from those of full precision."""
    measure = MEANS[name]
    interval = interval_of(table, [cell], measure.statistic, sums=measure.sums)
    return None if interval is None else measure.bounded(interval)


def _agreement(table: Measurements, cell: Cell, sums: Sums) -> Interval | None:
    other = interval_of(table, [cell], statistics.per_token, sums=sums)
    return None if other is None else agreement_of(other)


def over_draws(
    rows: Iterable[MeasurementRow], pooled: Iterable[PooledRow]
) -> dict[Cell, MeasurementRow]:
    """Return one row for each subject and scheme: over all draws, where there are several."""
    first: dict[Cell, MeasurementRow] = {}
    for row in rows:
        cell = row.subject, row.scheme
        if cell not in first or row.calibration_seed < first[cell].calibration_seed:
            first[cell] = row
    over = {(row.subject, row.scheme): row for row in pooled}
    return {cell: over[cell].over(row) if cell in over else row for cell, row in first.items()}


@dataclass(frozen=True)
class Moved:
    """How far arithmetic alone moved a measurement, per token; None is not measured."""

    nats: float
    kl: float | None = None
    top1: float | None = None  # the share of tokens


def noise(
    table: Measurements,
    floor: Mapping[Cell, Moved],
    other_dtype: Mapping[Cell, Moved],
    claim: ClaimKind = "method",
) -> tuple[Noise, ...]:
    """Return the parts of each relative error's width, where more than documents is known.

    `floor` holds how far rounding alone moves a measurement, and `other_dtype` how far another
    dtype does, where they were measured. Of a file, the draw is in no width.
    """
    cells = dict.fromkeys((*_drawn(table), *floor, *other_dtype))
    return tuple(_noise(table, c, floor.get(c), other_dtype.get(c), claim) for c in cells)


def _noise(
    table: Measurements,
    cell: Cell,
    floor: Moved | None,
    other_dtype: Moved | None,
    claim: ClaimKind,
) -> Noise:
    full, both = table.full(cell[0]), [cell, (cell[0], FULL_PRECISION)]
    result = over_draws = None
    if cell[1] != FULL_PRECISION:
        over_draws = estimated(table, both, statistics.excess)
        result = estimated(table.of_claim(claim), both, statistics.excess)
    finite = result if result is not None and np.isfinite(result.documents) else None
    draws = table.draws(*cell)
    of_draw = over_draws.draw if finite and over_draws else None
    return Noise(
        subject=cell[0],
        scheme=cell[1],
        draws=len(draws),
        interval=finite.interval if finite else None,
        documents=finite.documents if finite else None,
        draw=None if of_draw is None else of_draw * np.sqrt(len(draws)),
        share_of_draw=_share_of_draw(result, table.confidence) if result else None,
        numerical=_part_of_loss(floor, full),
        numerical_nats=floor.nats if floor else None,
        kl_floor=floor.kl if floor else None,
        top1_floor=floor.top1 if floor else None,
        other_dtype=_part_of_loss(other_dtype, full),
        other_dtype_nats=other_dtype.nats if other_dtype else None,
        other_dtype_kl=other_dtype.kl if other_dtype else None,
    )


def _part_of_loss(moved: Moved | None, full: Measurement | None) -> float | None:
    if moved is None or full is None or not is_finite(full):
        return None
    return moved.nats * float(full.evidence.tokens.sum()) / float(full.evidence.nll_sum.sum())


def _share_of_draw(result: Pooled, confidence: float) -> float | None:
    whole = result.interval
    squared = (whole.estimate - whole.low) ** 2 + (whole.high - whole.estimate) ** 2
    if result.draw is None or result.spread is None or not 0.0 < squared < np.inf:
        return None
    below, above = statistics.reach(result.spread, confidence)
    return max(0.0, 1 - (below**2 + above**2) / squared)


@dataclass(frozen=True)
class Deciding:
    """What would decide, in a sentence; the documents and draws where more of them do."""

    hint: str
    documents: int | None = None
    draws: int | None = None  # None: as many as there are


MORE_DRAWS = (3, 5, 7)
AT_THE_MARGIN = Deciding(
    f"at the margin: {MOST_TO_DECIDE:,} documents would not decide it in four of five cases"
)


def settling(
    table: Measurements,
    cells: Sequence[Cell],
    statistic: Statistic,
    margin: float = 0.0,
    split: str | None = None,
    *,
    confidence: float | None = None,
    sums: Sums = losses,
) -> Deciding:
    """Return the source of noise that decides on which side of a margin a quantity is."""
    columns = columns_of(table, cells, split, sums)
    if columns is None:
        return Deciding("")
    level = table.confidence if confidence is None else confidence
    result = columns.pooled(statistic, level)
    further = MORE_DRAWS if any(columns.noises) else ()
    numbers = [columns.draws, *(draws for draws in further if draws > columns.draws)]
    # Where only one half of the documents decides, twice as many are needed.
    share = table.documents / max(1, int(table.scored(split).sum()))
    needed = {
        draws: math.ceil(count * share)
        for draws in numbers
        if (count := documents_to_decide(result, margin, level, (columns.draws, draws)))
    }
    return cheapest_to_decide(needed, columns.draws, table.documents)


def cheapest_to_decide(needed: Mapping[int, int], draws: int, measured: int) -> Deciding:
    """Return the documents and draws that take the fewest passes over documents, of several."""
    feasible = {number: count for number, count in needed.items() if count <= MOST_TO_DECIDE}
    if not feasible:
        return AT_THE_MARGIN
    then = min(feasible, key=lambda number: number * feasible[number])
    documents, more = feasible[then], then if then > draws else None
    with_draws = f" and {then} calibration draws" if more else ""
    hint = f"needs about {documents:,} documents{with_draws} to decide; {measured:,} were measured"
    return Deciding(hint, documents, more)
