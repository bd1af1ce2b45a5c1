"""Change points of the loss and of every relative error along a run.

Each scheme is tested, and the place where the learning rate starts to fall is tested on its own;
all tests of all runs of an audit together have the error rate of one. The full-precision loss has
a row and no finding.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from qaudit.core import statistics
from qaudit.diagnostics.phases.changepoint import MINIMUM_POINTS, find_break, trajectory
from qaudit.diagnostics.phases.judge.run import Run
from qaudit.judge.pooling import columns_of
from qaudit.types import FULL_PRECISION, ChangeRow, Interval, Span, Where


def changes_of(
    run: Run, decay: Span | None, loss_end: Span | None, runs: int = 1
) -> tuple[ChangeRow, ...]:
    """Return a row for the loss and for each scheme of the audit, which has so many runs."""
    looks = runs * max(1, len(run.schemes)) * (1 if decay is None else 2)
    level = run.level(looks)
    schemes = (FULL_PRECISION, *run.table.quantized_schemes)
    return tuple(_change(run, scheme, level, decay, loss_end) for scheme in schemes)


def _change(
    run: Run, scheme: str, level: float, decay: Span | None, loss_end: Span | None
) -> ChangeRow:
    points = len(run.labels)
    if reason := _why_not(run, scheme):
        return ChangeRow(scheme, "unknown", reason, points)
    statistic = statistics.per_token if scheme == FULL_PRECISION else statistics.excess
    series = trajectory(run.places.positions, _sums(run, scheme), statistic)
    fit = find_break(series, level, expected=None if decay is None else decay.low)
    verdict: Literal["change", "bend", "none"] = "none"
    if fit.against_line <= 1 - level:
        verdict = "change" if fit.against_curve <= 1 - level else "bend"
    changed = verdict == "change"
    best, turn = fit.best, fit.expected
    return ChangeRow(
        scheme=scheme,
        verdict=verdict,
        points=points,
        kind=(best.kind if best.certain else "either") if changed else None,
        at=best.at if changed else None,
        effect=best.effect if changed and best.certain else None,
        against_line=fit.against_line,
        against_curve=fit.against_curve,
        decay=_where(best.at, decay) if changed else None,
        loss_end=_where(best.at, loss_end) if changed else None,
        turn_at_decay=turn.effect if turn else None,
        turn_at_decay_probability=turn.probability if turn else None,
        turns_at_decay=turn is not None and turn.probability <= 1 - level,
    )


def _why_not(run: Run, scheme: str) -> str:
    points, documents = len(run.labels), run.table.documents
    if points < MINIMUM_POINTS:
        return f"{points} checkpoints, and it takes {MINIMUM_POINTS}"
    if not run.is_solid:
        return f"{documents} documents, and it takes {statistics.MINIMUM_DOCUMENTS}"
    if not run.is_measured(scheme):
        return "not every checkpoint of the run has a finite loss under it"
    return ""


def _sums(run: Run, scheme: str) -> statistics.Array:
    """Return sums (K, N, D): of a scheme and full precision, or of full precision and tokens."""
    rows = []
    for label in run.labels:
        quantized, full = [(label, scheme)], [(label, FULL_PRECISION)]
        columns = columns_of(run.table, full if scheme == FULL_PRECISION else quantized + full)
        assert columns is not None  # `_why_not` refuses a run with a loss that is not finite
        rows.append(np.stack(columns.means[:2]))
    return np.stack(rows, axis=1)


def _where(at: Interval, span: Span | None) -> Where | None:
    if span is None:
        return None
    return "before" if at.high < span.low else "after" if at.low > span.high else "around"
