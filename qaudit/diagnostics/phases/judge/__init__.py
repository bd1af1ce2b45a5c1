"""The runs of an audit along their course: change points, the end of improvement, correlations.

Every statement is about one run in training order (`core.course`) and has an interval or a
probability that holds for all schemes at once. None is about causes: what changes along a run
changes together, and one run is one observation.
"""

from __future__ import annotations

import math
from dataclasses import replace

from qaudit.core.course import Places
from qaudit.core.course import courses as runs_in
from qaudit.diagnostics.phases.changepoint import MINIMUM_POINTS
from qaudit.diagnostics.phases.judge.changes import changes_of
from qaudit.diagnostics.phases.judge.correlations import Traits, correlations_of
from qaudit.diagnostics.phases.judge.findings import findings_of
from qaudit.diagnostics.phases.judge.run import Run, decay_of, loss_end_of, readings_of
from qaudit.judge.table import Table
from qaudit.types import FULL_PRECISION, Checkpoint, Course, Diagnostics, Finding


def judge(table: Table, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
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


def phases_of(table: Table, traits: Traits | None = None) -> tuple[Course, ...]:
    """Return the course of every run of at least two checkpoints."""
    runs = [(run, places) for run, places in _measured_runs(table) if len(run) > 1]
    searched = max(1, sum(len(run) >= MINIMUM_POINTS for run, _ in runs))
    return tuple(_course(table, run, places, traits or {}, searched) for run, places in runs)


def phase_findings(table: Table, courses: tuple[Course, ...]) -> tuple[Finding, ...]:
    """Return the findings of every run."""
    runs = {run[0].label: (run, places) for run, places in _measured_runs(table)}
    return tuple(
        finding
        for course in courses
        for finding in findings_of(Run(table, *runs[course.checkpoints[0]]), course)
    )


def _measured_runs(table: Table) -> list[tuple[list[Checkpoint], Places]]:
    single = [s.first for s in table.subjects if s.kind == "checkpoint"]
    return runs_in([c for c in single if table.find(c.label, FULL_PRECISION) is not None])


def _course(
    table: Table, checkpoints: list[Checkpoint], places: Places, traits: Traits, searched: int
) -> Course:
    run = Run(table, checkpoints, places)
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
