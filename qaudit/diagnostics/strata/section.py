"""Errors by stratum, the worst first, of what ships; all others are in `audit.json`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from qaudit.judge.strata import largest
from qaudit.report import document as doc
from qaudit.report.format import percent, shown, spread
from qaudit.report.views import View
from qaudit.types import Interval, StratumRow

TITLE = "Where the error is"
COLUMNS = doc.columns("stratum", "documents", "loss, nats", "added, %", "KL, nats")


def section(view: View) -> doc.Section:
    rows = view.audit.diagnostics.strata
    blocks = [block for cell in shipped(view) for block in _cell(cell, rows)]
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


def _cell(cell: tuple[str, str], rows: tuple[StratumRow, ...]) -> list[doc.Block]:
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
    return [doc.fold(summary, doc.TableBlock(COLUMNS, tuple(_row(row) for row in rows_of_cell)))]


def _row(one: StratumRow) -> doc.TableRow:
    return doc.row(
        doc.name_cell(one.stratum),
        f"{one.documents:,}",
        *numbers(one.ce, one.relative_error, one.kl),
    )


def numbers(ce: Interval, error: Interval | None, kl: Interval | None) -> list[str]:
    """Print a loss, its added loss and a divergence."""
    return [interval_of(ce, spread), interval_of(error, percent), interval_of(kl, spread)]


def interval_of(interval: Interval | None, show: Callable[..., str]) -> str:
    """Print an interval; of one document there are no bounds."""
    has_bounds = interval is not None and math.isfinite(interval.low + interval.high)
    return shown(interval, partial(show, bounds=has_bounds))
