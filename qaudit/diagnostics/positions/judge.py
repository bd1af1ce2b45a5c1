"""Loss and errors by where in its window a token is, so that damage to long context shows.

The unit stays the document: a bin sums each document's tokens there, and leaves out documents
that do not reach so far. All intervals of one subject under one scheme hold at once (Bonferroni
over its bins).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from qaudit.core import statistics
from qaudit.core.draws import DrawNoise, pooled
from qaudit.core.statistics import Array, Statistic
from qaudit.judge.draw_noise import noise_in, noise_of
from qaudit.judge.table import Cell, Measurements, divergences, is_finite
from qaudit.types import (
    FULL_PRECISION,
    Diagnostics,
    Finding,
    Interval,
    Measurement,
    PositionRow,
    Positions,
)


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the diagnostics with losses by position, and no finding."""
    return replace(diagnostics, positions=position_rows(table)), ()


def position_rows(table: Measurements) -> tuple[PositionRow, ...]:
    """Return a row for each subject, scheme and bin of positions that has tokens."""
    return tuple(row for cell in table.cells for row in _rows(table, cell))


def _rows(table: Measurements, cell: Cell) -> list[PositionRow]:
    draws = _with_positions(table.draws(*cell))
    if not draws:
        return []
    full = table.full(cell[0]) if cell[1] != FULL_PRECISION else None
    against = _with_positions([full]) if full is not None else []
    bins = np.flatnonzero(draws[0].tokens.sum(axis=0) > 0)
    level = statistics.simultaneous(table.confidence, len(bins))
    measured = table.draws(*cell)[0]
    noises = (
        noise_in(noise_of(table, cell)),
        noise_in(noise_of(table, cell, sums=divergences)),
    )
    return [_row(measured, int(b), draws, against, noises, level) for b in bins]


def _with_positions(draws: Sequence[Measurement]) -> list[Positions]:
    """Return the positions of every draw, or nothing where one has none."""
    recorded = [m.evidence.positions for m in draws if is_finite(m)]
    positions = [part for part in recorded if part is not None]
    return positions if len(positions) == len(draws) else []


def _row(
    measured: Measurement,
    b: int,
    draws: Sequence[Positions],
    against: Sequence[Positions],
    noises: tuple[DrawNoise | None, DrawNoise | None],
    level: float,
) -> PositionRow:
    tokens = draws[0].tokens[:, b]
    inside = tokens > 0
    count = tokens[inside].astype(np.float64)

    def interval(statistic: Statistic, noise: DrawNoise | None, *columns: Array) -> Interval | None:
        if not all(map(len, columns)):
            return None
        noises = (noise, *(None for _ in columns[1:]))
        return pooled(columns, statistic, level, noises).interval

    of_loss, of_kl = noises
    losses = np.array([draw.nll_sum[inside, b] for draw in draws])
    full = np.array([draw.nll_sum[inside, b] for draw in against])
    kl = np.array([draw.kl_sum[inside, b] for draw in draws if draw.kl_sum is not None])
    return PositionRow(
        subject=measured.subject,
        scheme=measured.scheme,
        spec=measured.spec,
        first=int(draws[0].edges[b]),
        last=int(draws[0].edges[b + 1]) - 1,
        documents=int(inside.sum()),
        tokens=int(tokens.sum()),
        ce=pooled((losses, count), statistics.per_token, level, (of_loss, None)).interval,
        relative_error=interval(statistics.excess, of_loss, losses, full),
        absolute_change=interval(statistics.change, of_loss, losses, full, count),
        kl=interval(statistics.per_token, of_kl, kl, count),
    )
