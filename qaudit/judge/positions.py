"""Loss and errors by where in its window a token is, so that damage to long context shows.

The unit stays the document: a bin sums each document's tokens there, and leaves out documents
that do not reach so far. All intervals of one subject under one scheme hold at once (Bonferroni
over its bins).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qaudit.core import statistics
from qaudit.core.draws import pooled
from qaudit.core.statistics import Array, Statistic
from qaudit.judge.pooling import Cell
from qaudit.judge.table import Table, is_finite
from qaudit.types import FULL_PRECISION, Interval, Measurement, PositionRow, Positions


def position_rows(table: Table) -> tuple[PositionRow, ...]:
    """Return a row for each subject, scheme and bin of positions that has tokens."""
    cells = dict.fromkeys((m.subject, m.scheme) for m in table.measurements)
    return tuple(row for cell in cells for row in _rows(table, cell))


def _rows(table: Table, cell: Cell) -> list[PositionRow]:
    draws = _with_positions(table.draws(*cell))
    if not draws:
        return []
    full = table.full(cell[0]) if cell[1] != FULL_PRECISION else None
    against = _with_positions([full]) if full is not None else []
    bins = np.flatnonzero(draws[0].tokens.sum(axis=0) > 0)
    level = statistics.simultaneous(table.confidence, len(bins))
    spec = table.draws(*cell)[0].spec
    return [_row(cell, spec, int(b), draws, against, level) for b in bins]


def _with_positions(draws: Sequence[Measurement]) -> list[Positions]:
    """Return the positions of every draw, or nothing where one has none."""
    known = [m.evidence.positions for m in draws if is_finite(m)]
    positions = [one for one in known if one is not None]
    return positions if len(positions) == len(draws) else []


def _row(
    cell: Cell,
    spec: str,
    b: int,
    draws: Sequence[Positions],
    against: Sequence[Positions],
    level: float,
) -> PositionRow:
    tokens = draws[0].tokens[:, b]
    inside = tokens > 0
    count = tokens[inside].astype(np.float64)

    def interval(statistic: Statistic, columns: list[tuple[Array, ...]]) -> Interval | None:
        return pooled(columns, statistic, level).interval if columns else None

    losses = [one.nll_sum[inside, b] for one in draws]
    full = [one.nll_sum[inside, b] for one in against]
    kl = [one.kl_sum[inside, b] for one in draws if one.kl_sum is not None]
    return PositionRow(
        subject=cell[0],
        scheme=cell[1],
        spec=spec,
        first=int(draws[0].edges[b]),
        last=int(draws[0].edges[b + 1]) - 1,
        documents=int(inside.sum()),
        tokens=int(tokens.sum()),
        ce=pooled([(loss, count) for loss in losses], statistics.per_token, level).interval,
        relative_error=interval(statistics.excess, [(a, f) for a in losses for f in full]),
        absolute_change=interval(statistics.change, [(a, f, count) for a in losses for f in full]),
        kl=interval(statistics.per_token, [(one, count) for one in kl]),
    )
