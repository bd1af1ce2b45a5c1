"""Events of a run -> the audit: results in the order of the plan, judged. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qaudit.diagnostics.registry import parts
from qaudit.errors import SourceError
from qaudit.executors.events import Compared, Ended, Event, Failed, Measured, Started, one_error
from qaudit.judge import EvidenceFiles, judge
from qaudit.judge.devices import Place, device_findings
from qaudit.judge.pooling import Moved
from qaudit.judge.released import WeightDifference, compared, released_findings
from qaudit.judge.table import Measurements
from qaudit.planning.detectable import with_detectable
from qaudit.policy import policy_named
from qaudit.saved.results import Filed, sha256_of
from qaudit.types import (
    FULL_PRECISION,
    AuditRecord,
    Diagnostics,
    Evidence,
    Finding,
    Perturbation,
    Plan,
    Skipped,
    Subject,
)
from qaudit.version import __version__


def judged(plan: Plan, events: Iterable[Event], out: Path) -> AuditRecord:
    """Judge what a plan's passes gave."""
    run = _Gathered.of(plan, tuple(events))
    measurements = [result.measurement for result in run.results]
    searches = [event.search for event in run.done if event.search is not None]
    recipe, environment = plan.recipe, run.ended.environment
    judgement = judge(
        run.subjects,
        measurements,
        _evidence_files(run.results, out),
        confidence=recipe.confidence,
        floor=moved_by("rounding", run.done),
        other_dtype=moved_by(recipe.compare_dtype, run.done),
        policy=policy_named(recipe.policy),
        today=datetime.fromisoformat(environment["began"]).astimezone(UTC).date(),
        searched=[search.row.label for search in searches],
        planned=plan.subjects,
        skipped={one.subject: one.reason for one in run.skipped},
        bits=recipe.bits,
    )
    diagnostics, advice = _derived(
        Measurements.of(run.subjects, measurements, recipe.confidence),
        replace(
            run.ended.diagnostics,
            greedy=tuple(search.row for search in searches),
            released=tuple(compared(release, one) for release, one in run.released),
            noise=judgement.noise,
        ),
    )
    others = [finding for search in searches for finding in search.findings]
    others += [*released_findings(run.released), *_of_devices(run), *advice]
    return AuditRecord(
        plan=with_detectable(plan, measurements),
        environment=environment,
        protocol=run.protocol,
        subjects=run.subjects,
        diagnostics=diagnostics,
        skipped=run.skipped,
        qaudit=__version__,
        measurements=judgement.measurements,
        pooled=judgement.pooled,
        tasks=judgement.tasks,
        comparisons=judgement.comparisons,
        findings=(*plan.findings, *judgement.findings, *others),
        pick=judgement.pick,
        verdict=judgement.verdict,
    )


@dataclass(frozen=True)
class _Gathered:
    """The events of a run, gathered in the order of its plan."""

    protocol: dict[str, Any]
    ended: Ended
    done: list[Measured]
    subjects: tuple[Subject, ...]
    skipped: tuple[Skipped, ...]
    released: list[tuple[Subject, WeightDifference]]

    @classmethod
    def of(cls, plan: Plan, events: Sequence[Event]) -> _Gathered:
        """Gather events; raise what failed where nothing was measured."""
        started = next(e for e in events if isinstance(e, Started))
        measured = _by_label(e for e in events if isinstance(e, Measured))
        failed = {e.label: e.error for e in events if isinstance(e, Failed)}
        differences = {e.release: e.difference for e in events if isinstance(e, Compared)}
        run = cls(
            protocol=started.protocol,
            ended=_together([e for e in events if isinstance(e, Ended)]),
            done=[measured[s.label] for s in plan.subjects if s.label in measured],
            subjects=tuple(_subjects(plan, measured)),
            skipped=tuple(_skipped(plan, measured, failed)),
            released=[(one, differences[one]) for one in plan.releases if one in differences],
        )
        if not run.results:
            raise one_error({s.label: failed[s.label] for s in plan.subjects if s.label in failed})
        return run

    @property
    def results(self) -> list[Filed]:
        return [result for event in self.done for result in event.results]


def _together(ends: Sequence[Ended]) -> Ended:
    """Return the end of all plans: diagnostics are those of the first."""
    every = [one.environment for one in ends]
    first, last = every[0], every[-1]
    sums = {key: last[key] + first[key] for key in ("hub_seconds_waited",) if key in first}
    began = {key: first[key] for key in ("began", "memory_baseline_nbytes")}
    environment = {**last, **began, **sums} if len(ends) > 1 else first
    if kinds := sorted({name for one in every for name in one.get("devices", ())}):
        on = {"measured_on": first["measured_on"]} if len(kinds) > 1 else {}
        known = {name: value for name, value in environment.items() if name != "measured_on"}
        environment = {**known, "devices": kinds, **on}
    return replace(ends[0], environment=environment)


def _by_label(events: Iterable[Measured]) -> dict[str, Measured]:
    """Return what was measured of each subject, that of further draws behind the first."""
    measured: dict[str, Measured] = {}
    for event in events:
        first = measured.setdefault(event.label, event)
        if first is not event:
            results = (*first.results, *event.results)
            perturbed = (*first.perturbed, *event.perturbed)
            failed = (*first.failed, *event.failed)
            elsewhere = (*first.elsewhere, *event.elsewhere)
            measured[event.label] = replace(
                first, results=results, perturbed=perturbed, failed=failed, elsewhere=elsewhere
            )
    return measured


def _subjects(plan: Plan, measured: Mapping[str, Measured]) -> Iterable[Subject]:
    """Yield what was measured, a search as the soup that it ended with."""
    for subject in plan.subjects:
        event = measured.get(subject.label)
        if event is not None and event.results:
            soup = event.search.subject if event.search else None
            yield soup or subject


def moved_by(
    perturbation: Perturbation | None, done: Sequence[Measured]
) -> dict[tuple[str, str], Moved]:
    """Return how far a perturbation moved each (subject, scheme)."""
    moved: dict[tuple[str, str], Moved] = {}
    for event in done:
        first = {one.measurement.spec: one.measurement.evidence for one in reversed(event.results)}
        for kind, result in event.perturbed:
            again = result.measurement
            if kind == perturbation:
                one = _moved(first[again.spec], again.evidence, again.spec)
                moved |= {(again.subject, again.scheme): one} if math.isfinite(one.nats) else {}
    return moved


def _of_devices(run: _Gathered) -> tuple[Finding, ...]:
    """Return the finding about kinds of devices, and how far each other one moved a measurement."""
    kinds = run.ended.environment.get("devices", ())
    moved: dict[Place, Moved] = {}
    for event in run.done:
        first = {one.measurement.spec: one.measurement.evidence for one in reversed(event.results)}
        for kind, result in event.elsewhere:
            again = result.measurement
            one = _moved(first[again.spec], again.evidence, again.spec)
            moved[again.subject, again.scheme, kind] = one
    labels = [subject.label for subject in run.subjects]
    return device_findings(kinds, moved, moved_by("rounding", run.done), labels)


def _moved(first: Evidence, again: Evidence, spec: str) -> Moved:
    """Return by how much a pass differs from the first."""
    tokens = float(again.tokens.sum())
    nats = abs(float(first.nll_sum.sum()) - float(again.nll_sum.sum())) / tokens
    one, other = first.fidelity, again.fidelity
    if other is None or (one is None and spec != FULL_PRECISION):
        return Moved(nats)
    # Full precision's divergence from itself is 0 at first.
    kl, same = (one.kl_sum.sum(), one.same_top.sum()) if one else (0.0, tokens)
    return Moved(
        nats,
        abs(float(other.kl_sum.sum()) - float(kl)) / tokens,
        abs(float(other.same_top.sum()) - float(same)) / tokens,
    )


def _derived(
    table: Measurements, diagnostics: Diagnostics
) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the tables with those that are derived from them, and the findings."""
    findings: list[Finding] = []
    for module in parts("judge"):
        diagnostics, more = module.judge(table, diagnostics)
        findings += more
    return diagnostics, tuple(findings)


def _evidence_files(results: Sequence[Filed], out: Path) -> EvidenceFiles:
    def at(path: Path) -> tuple[str, str]:
        return path.relative_to(out).as_posix(), sha256_of(path)

    files: dict[tuple[str, str, int | str], tuple[str, str]] = {}
    for result in results:
        of = (result.measurement.subject, result.measurement.spec)
        files[*of, result.measurement.calibration_seed] = at(result.path)
        files |= {(*of, task): at(path) for task, path in result.task_paths}
    return files


def _skipped(
    plan: Plan, measured: Mapping[str, Measured], failed: Mapping[str, SourceError]
) -> Iterable[Skipped]:
    """Yield what is missing and why, in the order of the plan."""
    planned = [subject.label for subject in (*plan.subjects, *plan.releases)]
    for label in dict.fromkeys((*planned, *failed)):
        if label in failed:
            reason = failed[label].message
            if label in measured:
                reason = f"its further draws of calibration text were not measured: {reason}"
            yield Skipped(label, None, reason)
        for scheme, error in measured[label].failed if label in measured else ():
            yield Skipped(label, scheme, error.message)
