"""Errors by stratum, position and role, of what ships; all others are in `audit.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from qaudit.judge.strata import largest
from qaudit.report import document as doc
from qaudit.report.format import percent, shown, spread
from qaudit.report.views import View
from qaudit.types import Interval, PositionRow, RoleRow, StratumRow

TITLE = "Where the error is"
_NUMBERS = ("documents", "loss, nats", "added, %", "KL, nats")


def section(view: View) -> doc.Section:
    diagnostics, cells = view.audit.diagnostics, shipped(view)
    blocks = [block for cell in cells for block in _strata(cell, diagnostics.strata)]
    for cell in cells:
        blocks += _roles(cell, diagnostics.roles) + _positions(cell, diagnostics.positions)
    return doc.Section(TITLE, tuple(blocks), 5)


def shipped(view: View) -> list[tuple[str, str]]:
    """Return the subject and scheme of each bit class of the verdict, or those of the pick."""
    verdict, pick = view.audit.verdict, view.audit.pick
    classes = verdict.classes if verdict is not None else ()
    cells = [
        (decision.subject, decision.scheme)
        for decision in classes
        if decision.subject and decision.scheme
    ]
    return list(dict.fromkeys(cells)) or ([(pick.subject, pick.scheme)] if pick else [])


def _strata(cell: tuple[str, str], rows: Sequence[StratumRow]) -> list[doc.Block]:
    rows_of_cell = [row for row in rows if (row.subject, row.scheme) == cell]
    errors = [row.relative_error for row in rows_of_cell if row.relative_error is not None]
    if not errors:
        return []
    rows_of_cell.sort(
        key=lambda one: -one.relative_error.estimate if one.relative_error else math.inf
    )
    worst, *lower = sorted(errors, key=lambda error: -error.estimate)
    overlap = ", intervals overlap" if any(error.high >= worst.low for error in lower) else ""
    summary = (
        f"{cell[0]} at {cell[1]}: most is added on {rows_of_cell[0].stratum}, "
        f"{interval_of(largest(errors), percent)} % ({len(rows_of_cell)} strata{overlap})"
    )
    return _folded(summary, "stratum", [(doc.name_cell(r.stratum), r) for r in rows_of_cell])


def _positions(cell: tuple[str, str], rows: Sequence[PositionRow]) -> list[doc.Block]:
    of_cell = [row for row in rows if (row.subject, row.scheme) == cell]
    if len(of_cell) < 2:  # one bin is the whole window
        return []
    title = f"{cell[0]} at {cell[1]}, by position in the window"
    return _folded(title, "positions", [(f"{r.first:,} to {r.last:,}", r) for r in of_cell])


def _roles(cell: tuple[str, str], rows: Sequence[RoleRow]) -> list[doc.Block]:
    of_cell = [(row.role, row) for row in rows if (row.subject, row.scheme) == cell]
    title = f"{cell[0]} at {cell[1]}, by role in the conversation"
    return _folded(title, "role", of_cell) if of_cell else []


def _folded(
    title: str,
    what: str,
    rows: Sequence[tuple[str | doc.Cell, StratumRow | PositionRow | RoleRow]],
) -> list[doc.Block]:
    cells = (
        doc.row(name, f"{row.documents:,}", *numbers(row.ce, row.relative_error, row.kl))
        for name, row in rows
    )
    return [doc.fold(title, doc.TableBlock(doc.columns(what, *_NUMBERS), tuple(cells)))]


def numbers(ce: Interval, error: Interval | None, kl: Interval | None) -> list[str]:
    """Print a loss, its added loss and a divergence."""
    return [interval_of(ce, spread), interval_of(error, percent), interval_of(kl, spread)]


def interval_of(interval: Interval | None, show: Callable[..., str]) -> str:
    """Print an interval; of one document there are no bounds."""
    has_bounds = interval is not None and math.isfinite(interval.low + interval.high)
    return shown(interval, partial(show, bounds=has_bounds))
