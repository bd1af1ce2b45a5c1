"""Loss and errors by group of documents, and by the role of a token in a conversation.

Damage to reasoning shows in roles. The unit stays the
document: a bin sums each document's tokens there, and leaves out documents without any. All
intervals of one subject under one scheme hold at once (Bonferroni over its bins).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from qaudit.core import statistics
from qaudit.core.statistics import Array, Statistic
from qaudit.judge.strata import stratum_rows
from qaudit.judge.table import Cell, Measurements, is_finite
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
    measured = table.draws(*cell)[0]
    part = _recorded(measured, name, kind)
    if part is None:
        return
    full = table.full(cell[0]) if cell[1] != FULL_PRECISION else None
    against = _recorded(full, name, kind) if full is not None else None
    bins = np.flatnonzero(part.tokens.sum(axis=0) > 0)
    level = statistics.simultaneous(table.confidence, len(bins))
    for b in map(int, bins):
        yield part, b, of_bin(measured, b, part, against, level)


def _recorded(measured: Measurement, name: str, kind: type[Binned]) -> Binned | None:
    part = getattr(measured.evidence, name)
    return part if is_finite(measured) and isinstance(part, kind) else None


def of_bin(
    measured: Measurement, b: int, part: Binned, full: Binned | None, level: float
) -> dict[str, Any]:
    """Return the columns of a bin, beside those of full precision."""
    tokens = part.tokens[:, b]
    inside = tokens > 0
    count = tokens[inside].astype(np.float64)
    losses = part.nll_sum[inside, b]

    def interval(statistic: Statistic, *columns: Array) -> Interval:
        return statistics.interval(columns, statistic, level)

    error = change = kl = None
    if full is not None:
        beside = full.nll_sum[inside, b]
        error = interval(statistics.excess, losses, beside)
        change = interval(statistics.change, losses, beside, count)
    if part.kl_sum is not None:
        kl = interval(statistics.per_token, part.kl_sum[inside, b], count)
    return {
        "subject": measured.subject,
        "scheme": measured.scheme,
        "spec": measured.spec,
        "documents": int(inside.sum()),
        "tokens": int(tokens.sum()),
        "ce": interval(statistics.per_token, losses, count),
        "relative_error": error,
        "absolute_change": change,
        "kl": kl,
    }
