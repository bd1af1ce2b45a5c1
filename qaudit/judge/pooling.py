"""Intervals over all draws of calibration text, which include the noise of the draw.

A quantity is a function of sums over documents, and its columns are the losses of some subjects
under some schemes (cells), in the function's order. Draws are paired by their seed: the same
calibration text quantized both, so that what is particular to it falls out of a difference.
Full precision has no draw and is paired with each. With one draw everything here is the
interval over documents that `core.statistics` gives, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from qaudit.core import statistics
from qaudit.core.draws import Pooled, documents_to_detect, pooled
from qaudit.core.statistics import Array, Statistic
from qaudit.judge.table import Table, is_finite
from qaudit.types import FULL_PRECISION, Evidence, Interval, Measurement, Noise, PooledRow

Cell = tuple[str, str]
"""A subject, and a scheme by its display name."""

Columns = list[tuple[Array, ...]]
"""For every draw, the sums of each document: losses in the order of cells, then tokens."""


Sums = Callable[[Evidence], Array]
"""What is summed over the tokens of each document."""


def losses(evidence: Evidence) -> Array:
    """Return the loss of each document."""
    return evidence.nll_sum


def divergences(evidence: Evidence) -> Array:
    """Return the KL divergence of each document to full precision; NaN if it was not measured."""
    fidelity = evidence.fidelity
    return fidelity.kl_sum if fidelity else np.full(len(evidence.tokens), np.nan)


def columns_of(
    table: Table, cells: Sequence[Cell], split: str | None = None, sums: Sums = losses
) -> Columns | None:
    """Return the columns of every draw that all cells have; None where a sum is missing."""
    draws_of = [table.draws(*cell) for cell in cells]
    known = (bool(np.isfinite(sums(m.evidence)).all()) for draws in draws_of for m in draws)
    if not all(draws_of) or not all(known):
        return None
    scored = table.scored(split)
    tokens = draws_of[0][0].evidence.tokens[scored].astype(np.float64)
    return [(*(sums(m.evidence)[scored] for m in row), tokens) for row in _rows(draws_of)]


def _rows(draws_of: Sequence[Sequence[Measurement]]) -> list[tuple[Measurement, ...]]:
    """Pair draws by seed, or in their order where no seed is common to all."""
    drawn = [draws for draws in draws_of if draws[0].scheme != FULL_PRECISION]
    if not drawn:
        return [tuple(draws[0] for draws in draws_of)]
    seeds = set.intersection(*({m.calibration_seed for m in draws} for draws in drawn))
    if seeds:
        drawn = [[m for m in draws if m.calibration_seed in seeds] for draws in drawn]
    rows = []
    for row in zip(*drawn, strict=bool(seeds)):
        left = iter(row)
        rows.append(tuple(d[0] if d[0].scheme == FULL_PRECISION else next(left) for d in draws_of))
    return rows


def estimated(
    table: Table,
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
    return pooled(columns, statistic, table.confidence if confidence is None else confidence)


# --------------------------------------------------------------------- rows of the audit


def pooled_scores(table: Table) -> tuple[PooledRow, ...]:
    """Return a row for every subject and scheme that was drawn for more than once."""
    return tuple(_pooled_score(table, cell) for cell in _drawn(table))


def _drawn(table: Table) -> list[Cell]:
    cells = dict.fromkeys((m.subject, m.scheme) for m in table.measurements)
    return [cell for cell in cells if len(table.draws(*cell)) > 1]


def _pooled_score(table: Table, cell: Cell) -> PooledRow:
    draws = table.draws(*cell)
    full = (cell[0], FULL_PRECISION)
    ce = _interval(estimated(table, [cell], statistics.per_token)) or statistics.UNKNOWN
    nbytes = int(draws[0].evidence.nbytes.sum())
    nll = float(np.mean([m.evidence.nll_sum.sum() for m in draws]))
    known = nbytes > 0 and ce != statistics.UNKNOWN
    return PooledRow(
        subject=cell[0],
        scheme=cell[1],
        spec=draws[0].spec,
        draws=len(draws),
        ce=ce,
        relative_error=_interval(estimated(table, [cell, full], statistics.excess)),
        absolute_change=_interval(estimated(table, [cell, full], statistics.change)),
        perplexity=statistics.perplexity(ce.estimate),
        bits_per_byte=statistics.bits_per_byte(nll, nbytes) if known else None,
    )


def _interval(result: Pooled | None) -> Interval | None:
    return None if result is None else result.interval


def noise(table: Table, floor: Mapping[Cell, float]) -> tuple[Noise, ...]:
    """Return what the width of each relative error is made of, where there are several draws.

    `floor` holds what rounding alone moves the loss by, in nats per token, where it was measured.
    """
    rows = [_noise(table, cell, floor.get(cell)) for cell in _drawn(table)]
    alone = [cell for cell in floor if cell not in _drawn(table)]
    return (*rows, *(_noise(table, cell, floor[cell]) for cell in alone))


def _noise(table: Table, cell: Cell, floor: float | None) -> Noise:
    full = table.full(cell[0])
    result = None
    if cell[1] != FULL_PRECISION:
        result = estimated(table, [cell, (cell[0], FULL_PRECISION)], statistics.excess)
    relative = None
    if floor is not None and full is not None and is_finite(full):
        relative = floor * float(full.evidence.tokens.sum()) / float(full.evidence.nll_sum.sum())
    known = result if result is not None and np.isfinite(result.documents) else None
    return Noise(
        subject=cell[0],
        scheme=cell[1],
        draws=len(table.draws(*cell)),
        interval=known.interval if known else None,
        documents=known.documents if known else None,
        draw=known.draw if known else None,
        share_of_draw=_share_of_draw(result, table.confidence) if result else None,
        numerical=relative,
        numerical_nats=floor,
    )


def _share_of_draw(result: Pooled, confidence: float) -> float | None:
    """Return the part of an interval's squared width that the draw makes."""
    whole = result.interval
    squared = (whole.estimate - whole.low) ** 2 + (whole.high - whole.estimate) ** 2
    if result.draw is None or result.spread is None or not 0.0 < squared < np.inf:
        return None
    below, above = statistics.reach(result.spread, confidence)
    return max(0.0, 1 - (below**2 + above**2) / squared)


# ------------------------------------------------------------------ the documents needed to decide


def settling(
    table: Table,
    cells: Sequence[Cell],
    statistic: Statistic,
    margin: float = 0.0,
    split: str | None = None,
    *,
    confidence: float | None = None,
) -> str:
    """Return a hint: the documents needed to decide on which side of a margin a quantity is."""
    level = table.confidence if confidence is None else confidence
    columns = columns_of(table, cells, split)
    if columns is None:
        return ""
    estimate = pooled(columns, statistic).interval.estimate
    measured = int(table.scored(split).sum())
    needed = _needed(columns, statistic, abs(estimate - margin), level)
    if needed is not None:
        every = -(-needed * table.documents // measured)  # where only one half decides
        needed = max(every, statistics.MINIMUM_DOCUMENTS)
        return f"needs about {needed} documents to decide; {table.documents} were measured"
    if len(columns) > 1:
        mean = tuple(np.mean(column, axis=0) for column in zip(*columns, strict=True))
        effect = abs(estimate - margin)
        if _needed([mean], statistic, effect, level) is not None:
            return (
                f"more documents do not decide it with {len(columns)} draws of calibration text: "
                "raise `--repeats`"
            )
    return "more documents may not decide it: the estimate is at the margin"


def _needed(columns: Columns, statistic: Statistic, effect: float, level: float) -> int | None:
    if not effect > 0.0:
        return None
    return documents_to_detect(columns, statistic, effect, level)
