"""What a series shows along its course: where it changes, when loss stops, what goes together.

Every statement is about one run in training order (`core.series.course`) and has an interval or a
probability that holds for all schemes at once. None is about causes: what changes along a run
changes together, and one run is one observation.

`changes` searches for breaks, `pairs` compares checkpoints of a course all at once, `stops` finds
where full precision stops improving and reads three phases, `together` correlates, and `advice`
makes findings.
"""

from __future__ import annotations

from collections.abc import Mapping

from qaudit.core.series.course import Places, courses
from qaudit.diagnostics.phases.judge.advice import advise
from qaudit.diagnostics.phases.judge.changes import changes_of
from qaudit.diagnostics.phases.judge.decay import decay_of
from qaudit.diagnostics.phases.judge.pairs import Run
from qaudit.diagnostics.phases.judge.stops import loss_end_of, readings_of
from qaudit.diagnostics.phases.judge.together import correlations_of
from qaudit.judge.table import Table
from qaudit.types import FULL_PRECISION, Checkpoint, Course, Finding

Traits = Mapping[str, Mapping[str, float]]
"""Quantity -> checkpoint -> value: what diagnostics measured of whole models."""

__all__ = ["Traits", "phase_findings", "phases_of"]


def phases_of(table: Table, traits: Traits | None = None) -> tuple[Course, ...]:
    """Return the course of every run of at least two checkpoints."""
    return tuple(
        _course(table, run, places, traits or {})
        for run, places in _measured_runs(table)
        if len(run) > 1
    )


def phase_findings(table: Table, found: tuple[Course, ...]) -> tuple[Finding, ...]:
    """Return the findings of every run."""
    runs = {run[0].label: (run, places) for run, places in _measured_runs(table)}
    return tuple(
        finding
        for course in found
        for finding in advise(Run(table, *runs[course.checkpoints[0]]), course)
    )


def _measured_runs(table: Table) -> list[tuple[list[Checkpoint], Places]]:
    single = [s.first for s in table.subjects if s.kind == "checkpoint"]
    return courses([c for c in single if table.find(c.label, FULL_PRECISION) is not None])


def _course(table: Table, checkpoints: list[Checkpoint], places: Places, traits: Traits) -> Course:
    run = Run(table, checkpoints, places)
    decay, decay_reason = decay_of(run)
    loss_end, loss_end_reason = loss_end_of(run)
    return Course(
        run=_name(checkpoints),
        unit=places.unit,
        checkpoints=run.labels,
        positions=places.positions,
        confidence=table.confidence,
        decay=decay,
        decay_reason=decay_reason,
        loss_end=loss_end,
        loss_end_reason=loss_end_reason,
        changes=changes_of(run, decay, loss_end),
        readings=readings_of(run),
        correlations=correlations_of(run, traits),
    )


def _name(checkpoints: list[Checkpoint]) -> str:
    first, last = checkpoints[0].label, checkpoints[-1].label
    return f"{first} to {last}"
