"""The runs of an audit along their course: change points, the end of improvement, correlations.

Every statement is about one run in training order (`core.course`) and has an interval or a
probability that holds for all schemes at once. None is about causes: what changes along a run
changes together, and one run is one observation.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from qaudit.core import statistics
from qaudit.core.course import Places
from qaudit.core.course import courses as runs_in
from qaudit.diagnostics.phases.changepoint import MINIMUM_POINTS, find_break, trajectory
from qaudit.diagnostics.phases.judge.correlations import Traits, correlations_of
from qaudit.diagnostics.phases.judge.findings import findings_of
from qaudit.diagnostics.phases.judge.run import PhaseRun, decay_of, loss_end_of, readings_of
from qaudit.judge.pooling import columns_of
from qaudit.judge.table import Measurements
from qaudit.types import (
    FULL_PRECISION,
    ChangeRow,
    Checkpoint,
    Course,
    Diagnostics,
    Finding,
    Interval,
    Span,
    Where,
)


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the diagnostics with the table `phases`, and the findings QA030 to QA032."""
    courses = phases_of(table, traits_of(diagnostics))
    return replace(diagnostics, phases=courses), phase_findings(table, courses)


def traits_of(diagnostics: Diagnostics) -> Traits:
    """Return quantities of whole models that other diagnostics measured, to set beside an error."""
    quantities = {
        "kurtosis": {
            row.subject: row.kurtosis
            for row in diagnostics.weights
            if row.part == "model" and row.kurtosis is not None
        },
        "curvature": {
            row.subject: row.trace.estimate
            for row in diagnostics.curvature
            if row.part == "model" and math.isfinite(row.trace.estimate)
        },
    }
    return {name: values for name, values in quantities.items() if values}


def phases_of(table: Measurements, traits: Traits | None = None) -> tuple[Course, ...]:
    runs = [(run, places) for run, places in _measured_runs(table) if len(run) > 1]
    searched = max(1, sum(len(run) >= MINIMUM_POINTS for run, _ in runs))
    return tuple(_course(table, run, places, traits or {}, searched) for run, places in runs)


def phase_findings(table: Measurements, courses: tuple[Course, ...]) -> tuple[Finding, ...]:
    runs = {run[0].label: (run, places) for run, places in _measured_runs(table)}
    return tuple(
        finding
        for course in courses
        for finding in findings_of(PhaseRun(table, *runs[course.checkpoints[0]]), course)
    )


def _measured_runs(table: Measurements) -> list[tuple[list[Checkpoint], Places]]:
    single = [s.first for s in table.subjects if s.kind == "checkpoint"]
    return runs_in([c for c in single if table.find(c.label, FULL_PRECISION) is not None])


def _course(
    table: Measurements,
    checkpoints: list[Checkpoint],
    places: Places,
    traits: Traits,
    searched: int,
) -> Course:
    run = PhaseRun(table, checkpoints, places)
    decay, decay_reason = decay_of(run)
    loss_end, loss_end_reason = loss_end_of(run)
    return Course(
        run=f"{run.labels[0]} to {run.labels[-1]}",
        unit=places.unit,
        checkpoints=run.labels,
        positions=places.positions,
        confidence=table.confidence,
        decay=decay,
        decay_reason=decay_reason,
        loss_end=loss_end,
        loss_end_reason=loss_end_reason,
        changes=changes_of(run, decay, loss_end, searched),
        readings=readings_of(run),
        correlations=correlations_of(run, traits),
    )


def changes_of(
    run: PhaseRun, decay: Span | None, loss_end: Span | None, runs: int = 1
) -> tuple[ChangeRow, ...]:
    """Return a row for the loss and for each scheme of the audit, which has so many runs."""
    looks = runs * max(1, len(run.schemes)) * (1 if decay is None else 2)
    level = run.level(looks)
    schemes = (FULL_PRECISION, *run.table.quantized_schemes)
    return tuple(_change_of(run, scheme, level, decay, loss_end) for scheme in schemes)


def _change_of(
    run: PhaseRun, scheme: str, level: float, decay: Span | None, loss_end: Span | None
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


def _why_not(run: PhaseRun, scheme: str) -> str:
    points, documents = len(run.labels), run.table.documents
    if points < MINIMUM_POINTS:
        return f"{points} checkpoints, and it takes {MINIMUM_POINTS}"
    if not run.is_solid:
        return f"{documents} documents, and it takes {statistics.MINIMUM_DOCUMENTS}"
    if not run.is_measured(scheme):
        return "not every checkpoint of the run has a finite loss under it"
    return ""


def _sums(run: PhaseRun, scheme: str) -> statistics.Array:
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
