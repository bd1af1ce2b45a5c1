"""Loss and errors by group of documents, and by the role of a token in a conversation.

Damage to reasoning shows in roles. The unit stays the
document: a bin sums each document's tokens there, and leaves out documents without any. All
intervals of one subject under one scheme hold at once (Bonferroni over its bins).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from qaudit.core import statistics
from qaudit.core.draws import DrawNoise, pooled
from qaudit.core.statistics import Array, Statistic
from qaudit.judge.draw_noise import noise_in, noise_of
from qaudit.judge.strata import stratum_rows
from qaudit.judge.table import Cell, Measurements, divergences, is_finite
from qaudit.types import (
    FULL_PRECISION,
    Diagnostics,
    Finding,
    Interval,
    Measurement,
    Positions,
    RoleRow,
    Roles,
)

Binned = TypeVar("Binned", Positions, Roles)


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    return replace(diagnostics, strata=stratum_rows(table), roles=role_rows(table)), ()


def role_rows(table: Measurements) -> tuple[RoleRow, ...]:
    return tuple(
        RoleRow(role=bins.names[b], **columns)
        for cell in table.cells
        for bins, b, columns in columns_of(table, cell, "roles", Roles)
    )


def columns_of(
    table: Measurements, cell: Cell, name: str, kind: type[Binned]
) -> Iterator[tuple[Binned, int, dict[str, Any]]]:
    draws = _recorded(table.draws(*cell), name, kind)
    if not draws:
        return
    full = table.full(cell[0]) if cell[1] != FULL_PRECISION else None
    against = _recorded([full], name, kind) if full is not None else []
    bins = np.flatnonzero(draws[0].tokens.sum(axis=0) > 0)
    level = statistics.simultaneous(table.confidence, len(bins))
    measured = table.draws(*cell)[0]
    noises = (noise_in(noise_of(table, cell)), noise_in(noise_of(table, cell, sums=divergences)))
    for b in map(int, bins):
        yield draws[0], b, of_bin(measured, b, draws, against, noises, level)


def _recorded(draws: Sequence[Measurement], name: str, kind: type[Binned]) -> list[Binned]:
    """Return the sums of every draw, or nothing where one has none."""
    recorded = [getattr(m.evidence, name) for m in draws if is_finite(m)]
    sums = [part for part in recorded if isinstance(part, kind)]
    return sums if len(sums) == len(draws) else []


def of_bin(
    measured: Measurement,
    b: int,
    draws: Sequence[Binned],
    against: Sequence[Binned],
    noises: tuple[DrawNoise | None, DrawNoise | None],
    level: float,
) -> dict[str, Any]:
    """Return the columns of a bin; each draw has the sums of its documents."""
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
    return {
        "subject": measured.subject,
        "scheme": measured.scheme,
        "spec": measured.spec,
        "documents": int(inside.sum()),
        "tokens": int(tokens.sum()),
        "ce": pooled((losses, count), statistics.per_token, level, (of_loss, None)).interval,
        "relative_error": interval(statistics.excess, of_loss, losses, full),
        "absolute_change": interval(statistics.change, of_loss, losses, full, count),
        "kl": interval(statistics.per_token, of_kl, kl, count),
    }
