"""Loss and errors by group of documents, and by the role of a token in a conversation.

Damage to reasoning shows in roles. The unit stays the
document: a bin sums each document's tokens there, and leaves out documents without any. All
intervals of one subject under one scheme hold at once (Bonferroni over its bins).

Errors by stratum, position and role, of what ships; all others are in `audit.json`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.statistics import Array, Statistic
from qaudit.judge.scores import largest, strata_of
from qaudit.judge.table import Measurements, divergences, is_finite
from qaudit.report import document as doc
from qaudit.report.format import or_dash, percent, spread
from qaudit.report.views import View
from qaudit.types import (
    FULL_PRECISION,
    Diagnostics,
    Finding,
    Interval,
    Measurement,
    PositionRow,
    Positions,
    RoleRow,
    Roles,
    StratumRow,
)

Binned = Positions | Roles


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    roles = tuple(RoleRow(**columns) for columns in columns_of(table, "roles"))
    return replace(diagnostics, strata=(*stratum_rows(table),), roles=roles), ()


def stratum_rows(table: Measurements) -> Iterator[StratumRow]:
    """Yield a row for each subject, scheme and stratum: a bin that has whole documents."""
    for subject, scheme in table.cells:
        measured, full = table.draws(subject, scheme)[0], table.full(subject)
        if not (strata := strata_of(measured)):
            continue
        part, beside = _grouped(measured, strata), None
        if scheme == FULL_PRECISION:
            part = replace(part, kl_sum=None)
        elif full is not None and is_finite(full) and is_finite(measured):
            beside = _grouped(full, strata)
        rows = [columns for *_, columns in bins_of(measured, part, beside, table.confidence)]
        errors = [row["relative_error"] for row in rows]
        worst = max(filter(None, errors), key=lambda error: error.estimate, default=None)
        for row, error in zip(rows, errors, strict=True):
            yield StratumRow(stratum=row.pop("role"), **row, is_worst=error is worst is not None)


def _grouped(measured: Measurement, strata: Mapping[str, npt.NDArray[np.bool_]]) -> Roles:
    """Return the sums of documents by stratum; a loss that is not finite leaves all unknown."""
    evidence, scored = measured.evidence, measured.evidence.scored()
    inside_DS = np.stack([*strata.values()], axis=1)
    tokens, losses, kl = (
        np.where(inside_DS, sums[scored, None], 0)
        for sums in (evidence.tokens, evidence.nll_sum, divergences(evidence))
    )
    losses = losses if is_finite(measured) else np.full_like(losses, np.nan)
    return Roles((*strata,), tokens, losses, kl if np.isfinite(kl).all() else None)


def columns_of(table: Measurements, name: str) -> Iterator[dict[str, Any]]:
    """Yield the columns of each bin that has tokens, of every subject under every scheme."""

    def recorded(measured: Measurement | None) -> Binned | None:
        return getattr(measured.evidence, name) if measured and is_finite(measured) else None

    for subject, scheme in table.cells:
        measured = table.draws(subject, scheme)[0]
        if (part := recorded(measured)) is not None:
            full = recorded(table.full(subject) if scheme != FULL_PRECISION else None)
            for _, _, columns in bins_of(measured, part, full, table.confidence):
                yield columns


def bins_of(
    measured: Measurement, part: Binned, full: Binned | None, confidence: float
) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """Yield each bin that has tokens, a level at which all hold, and its columns."""
    bins = np.flatnonzero(part.tokens.sum(axis=0) > 0)
    level = statistics.simultaneous(confidence, len(bins))
    for b in map(int, bins):
        tokens = part.tokens[:, b]
        inside = tokens > 0
        count = tokens[inside].astype(np.float64)
        losses = part.nll_sum[inside, b]

        def interval(statistic: Statistic, *columns: Array) -> Interval:
            return statistics.interval(columns, statistic, level)

        error = change = kl = None
        if full is not None:  # beside full precision
            beside = full.nll_sum[inside, b]
            error = interval(statistics.excess, losses, beside)
            change = interval(statistics.change, losses, beside, count)
        if part.kl_sum is not None:
            kl = interval(statistics.per_token, part.kl_sum[inside, b], count)
        if isinstance(part, Roles):
            place: dict[str, Any] = {"role": part.names[b]}
        else:
            place = {"first": int(part.edges[b]), "last": int(part.edges[b + 1]) - 1}
        yield (
            b,
            level,
            {
                "subject": measured.subject,
                "scheme": measured.scheme,
                "spec": measured.spec,
                "documents": int(inside.sum()),
                "tokens": int(tokens.sum()),
                "ce": interval(statistics.per_token, losses, count),
                "relative_error": error,
                "absolute_change": change,
                "kl": kl,
                **place,
            },
        )


TITLE = "Where the error is"
_NUMBERS = ("documents", "loss, nats", "added, %", "KL, nats")


def section(view: View) -> doc.Section:
    diagnostics, cells = view.audit.diagnostics, view.ships
    blocks = [block for cell in cells for block in _strata(cell, diagnostics.strata)]
    for cell in cells:
        at = f"{cell[0]} at {cell[1]}"
        roles: Rows = [(r.role, r) for r in diagnostics.roles if r.cell == cell]
        if roles:
            blocks.append(_folded(f"{at}, by role in the conversation", "role", roles))
        places: Rows = [
            (f"{row.first:,} to {row.last:,}", row)
            for row in diagnostics.positions
            if row.cell == cell
        ]
        if len(places) > 1:  # one bin is the whole window
            blocks.append(_folded(f"{at}, by position in the window", "positions", places))
    return doc.Section(TITLE, tuple(blocks), 5)


def _strata(cell: tuple[str, str], rows: Sequence[StratumRow]) -> list[doc.Block]:
    rows_of_cell = [row for row in rows if row.cell == cell]
    errors = [row.relative_error for row in rows_of_cell if row.relative_error is not None]
    if not errors:
        return []
    rows_of_cell.sort(
        key=lambda row: -row.relative_error.estimate if row.relative_error else math.inf
    )
    worst, *lower = sorted(errors, key=lambda error: -error.estimate)
    overlap = ", intervals overlap" if any(error.high >= worst.low for error in lower) else ""
    summary = (
        f"{cell[0]} at {cell[1]}: most is added on {rows_of_cell[0].stratum}, "
        f"{interval_of(largest(errors), percent)} % ({len(rows_of_cell)} strata{overlap})"
    )
    return [_folded(summary, "stratum", [(doc.name_cell(r.stratum), r) for r in rows_of_cell])]


Rows = Sequence[tuple[str | doc.Cell, StratumRow | PositionRow | RoleRow]]


def _folded(title: str, what: str, rows: Rows) -> doc.Block:
    cells = (
        (
            name,
            f"{row.documents:,}",
            interval_of(row.ce, spread),
            interval_of(row.relative_error, percent),
            interval_of(row.kl, spread),
        )
        for name, row in rows
    )
    return doc.fold(title, doc.table((what, *_NUMBERS), cells))


def interval_of(interval: Interval | None, show: Callable[..., str]) -> str:
    """Print an interval; of one document there are no bounds."""
    has_bounds = interval is not None and math.isfinite(interval.low + interval.high)
    return or_dash(interval, partial(show, bounds=has_bounds))
