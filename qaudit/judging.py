"""Records of a run -> the audit: results in the order of the plan, judged. No torch.

A saved audit is judged again here: `gate`, `pick`, `decide`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from qaudit.core.course import previous_of
from qaudit.diagnostics.diagnostic import Diagnostic, judges, module, parse_diagnostics
from qaudit.errors import SourceError
from qaudit.executors.records import RETRY_TASK, Record, one_error, read_record
from qaudit.judge import EvidenceFiles
from qaudit.judge import judge as judge_measurements
from qaudit.judge.choose import parse_objective
from qaudit.judge.gate import GateInput, verdict_of
from qaudit.judge.gate import gate as gate_measurements
from qaudit.judge.table import Measurements, Moved
from qaudit.planning.price import detectable_error, planned_rounds
from qaudit.policy import policy_named
from qaudit.report.verdict import next_step
from qaudit.saved.audits import read_audit
from qaudit.saved.codec import decode
from qaudit.saved.evidence import SavedAudit, combine, must_be_signed
from qaudit.saved.parts import DiagnosticRows, UnitDocument, read_run, unfinished
from qaudit.saved.results import ResultFile, UnitOutcome, sha256_of, with_imported
from qaudit.tables import Audit
from qaudit.types import (
    FULL_PRECISION,
    SILENT,
    AuditRecord,
    Diagnostics,
    Gate,
    NotDiagnosed,
    Pick,
    Plan,
    Policy,
    Skipped,
    Subject,
    Verdict,
    Watch,
    reference_in,
    units_of,
)
from qaudit.version import __version__


def judge_so_far(out: Path) -> AuditRecord:
    """Judge what is measured of an unfinished scan; the rest is listed as not measured."""
    run = read_run(out)
    units = [unit for due in planned_rounds(run.plan.passes) for unit in units_of(due)]
    read = {unit.label: read_record(run, out, unit) for unit in units}
    records = [record for record in read.values() if record is not None]
    if all(record.error is not None for record in records):
        raise unfinished(out, 0, len(run.plan.subjects))
    return judge(run.plan, records, out, [name for name, record in read.items() if record is None])


def judge(
    plan: Plan, records: Sequence[Record], out: Path, missing: Sequence[str] = ()
) -> AuditRecord:
    """Judge what the rounds of a plan gave; its evidence is in `out`."""
    planned = {subject.label for subject in plan.subjects}
    records = [record for record in records if record.label in planned]  # others are candidates
    by_label = _by_label(record for record in records if record.error is None)
    failed = {each.label: each.error for each in records if each.error is not None}
    later = SourceError("not measured yet", hint="run the same command again")
    failed |= dict.fromkeys(missing, later)
    measured = [by_label[s.label] for s in plan.subjects if s.label in by_label]
    results = with_imported([result for each in measured for result in each.plain], out)
    if not results:
        raise one_error({s.label: failed[s.label] for s in plan.subjects if s.label in failed})
    for task, reason in records[0].document.failed_tasks.items():
        failed[f"task {task}"] = SourceError(reason, hint=RETRY_TASK)
    subjects = tuple(  # a search as the soup that it ended with
        by_label[s.label].soup or s
        for s in plan.subjects
        if s.label in by_label and by_label[s.label].plain
    )
    skipped = tuple(_skipped(plan, by_label, failed))
    measurements = [result.measurement for result in results]
    searches = [each.search for each in measured if each.search is not None]
    diagnosed = replace(_diagnosed(plan, records), greedy=tuple(searches))
    record = AuditRecord(
        schema="1",
        plan=replace(plan, detectable_relative_error=detectable_error(plan, measurements)),
        environment=environment_of([record.document for record in records]),
        protocol=records[0].document.protocol,
        subjects=subjects,
        measurements=(),
        tasks=(),
        comparisons=(),
        findings=(),
        pick=None,
        skipped=skipped,
        diagnostics=diagnosed,
        qaudit=__version__,
    )
    every = Measurements.of(subjects, measurements, plan.recipe.confidence)
    reference = reference_in(plan.subjects, plan.recipe.reference)
    judgement = judge_measurements(
        every,
        _evidence_files(results, out),
        GateInput.of(record, every.first_draws, "audit"),
        floor=moved_by_rounding(measured),
        policy=policy_named(plan.recipe.policy),
        today=datetime.fromisoformat(record.environment["began"]).astimezone(UTC).date(),
        reference=reference.label if reference else None,
    )
    diagnostics = replace(diagnosed, noise=judgement.noise)
    further = [finding for each in measured for finding in each.findings]
    for judging in judges(plan.recipe.diagnostics):
        diagnostics, advice = judging.judge(every.first_draws, diagnostics)
        further += advice
    findings = (*plan.findings, *judgement.findings, *further)
    columns = judgement.fields | {"findings": findings, "diagnostics": diagnostics}
    record = replace(record, **columns)
    if judgement.verdict is None:
        return record
    step = next_step(record, judgement.verdict.classes)
    return replace(record, verdict=replace(judgement.verdict, next_step=step))


def environment_of(documents: Sequence[UnitDocument]) -> dict[str, Any]:
    """Return one environment of those of all units: what differs is listed or summed."""
    every = [document.environment for document in documents]
    merged = dict(every[-1])
    merged["began"] = min(environment["began"] for environment in every)
    merged["ended"] = max(environment["ended"] for environment in every)
    for name in ("memory_baseline_nbytes", "memory_peak_nbytes"):
        merged[name] = max(environment[name] for environment in every)
    for name in [name for name in merged if name.startswith("hub_")]:  # so far, in each process
        used: dict[tuple[str, str, str], float] = {}
        for document, one in zip(documents, every, strict=True):
            process = (document.part, document.host, one["began"])
            used[process] = max(used.get(process, 0), one.get(name, 0))
        merged[name] = sum(used.values())
    merged["parts"] = len({document.part for document in documents})
    merged["hosts"] = len({document.host for document in documents})
    return merged


def _diagnosed(plan: Plan, records: Sequence[Record]) -> Diagnostics:
    documents = {record.document.label: record.document for record in reversed(records)}
    subjects = [s for s in plan.subjects if s.label in documents]
    labels = [s.label for s in subjects if documents[s.label].error is None]
    rows = {label: document.diagnostics for label, document in documents.items()}
    return tables_of(parse_diagnostics(plan.recipe.diagnostics), rows, labels, subjects)


def tables_of(
    diagnostics: Iterable[Diagnostic],
    rows: Mapping[str, DiagnosticRows],
    labels: Sequence[str],
    subjects: Sequence[Subject],
) -> Diagnostics:
    """Return the rows of all subjects, in the order of the labels; `subjects` is the series."""
    before = {subject.label: previous_of(subject, subjects) for subject in subjects}
    labels_before = {
        label: checkpoint.label for label, checkpoint in before.items() if checkpoint is not None
    }
    of_subject = [rows.get(label, DiagnosticRows()) for label in labels]
    tables: dict[str, Any] = {}
    names = [diagnostic.name for diagnostic in diagnostics]
    for name in names:
        table = [row for record in of_subject for row in record.rows.get(name, ())]
        summarize = getattr(module(name), "summarize", None)
        tables[name] = table if summarize is None else summarize(table, labels_before)
    columns = {field.name for field in fields(Diagnostics)}
    further = {name: tables.pop(name) for name in tables.keys() - columns if tables[name]}
    measured = decode(Diagnostics, {**tables, "others": further}, "diagnostics")
    skipped = (
        NotDiagnosed(label, name, record.reasons[name])
        for label, record in zip(labels, of_subject, strict=True)
        for name in names
        if name in record.reasons and name not in record.rows
    )
    return replace(measured, skipped=tuple(skipped))


def _by_label(outcomes: Iterable[UnitOutcome]) -> dict[str, UnitOutcome]:
    measured: dict[str, UnitOutcome] = {}
    for outcome in outcomes:
        first = measured.setdefault(outcome.label, outcome)
        if first is not outcome:
            results = (*first.results, *outcome.results)
            failed = {**first.failed, **outcome.failed}
            measured[outcome.label] = replace(first, results=results, failed=failed)
    return measured


def moved_by_rounding(done: Sequence[UnitOutcome]) -> dict[tuple[str, str], Moved]:
    """Return how far rounding otherwise moved each (subject, scheme)."""
    every: dict[tuple[str, str], Moved] = {}
    for outcome in done:
        first = {filed.measurement.spec: filed.measurement for filed in reversed(outcome.plain)}
        for again in (filed.measurement for filed in outcome.results if filed.perturbed):
            before, behind = first[again.spec].evidence, again.evidence
            tokens = float(behind.tokens.sum())
            nats = abs(float(before.nll_sum.sum()) - float(behind.nll_sum.sum())) / tokens
            if not math.isfinite(nats):
                continue
            moved, at_first, now = Moved(nats), before.fidelity, behind.fidelity
            if now is not None and (at_first is not None or again.spec == FULL_PRECISION):
                # Full precision's divergence from itself is 0 at first.
                kl = float(at_first.kl_sum.sum()) if at_first else 0.0
                same = float(at_first.same_top.sum()) if at_first else tokens
                moved = Moved(
                    nats,
                    abs(float(now.kl_sum.sum()) - kl) / tokens,
                    abs(float(now.same_top.sum()) - same) / tokens,
                )
            every[again.cell] = moved
    return every


def _evidence_files(results: Sequence[ResultFile], out: Path) -> EvidenceFiles:
    def at(path: Path) -> tuple[str, str]:
        return path.relative_to(out).as_posix(), sha256_of(path)

    files: dict[tuple[str, str, int | str], tuple[str, str]] = {}
    for result in results:
        of = (result.measurement.subject, result.measurement.spec)
        files[*of, result.measurement.calibration_seed] = at(result.path)
        files |= {(*of, task): at(path) for task, path in result.task_paths}
    return files


def _skipped(
    plan: Plan, measured: Mapping[str, UnitOutcome], failed: Mapping[str, SourceError]
) -> Iterable[Skipped]:
    planned = [subject.label for subject in plan.subjects]
    for label in dict.fromkeys((*planned, *failed)):
        if label in failed:
            reason = failed[label].message
            if label in measured:
                reason = f"a further round of it was not measured: {reason}"
            yield Skipped(label, None, reason)
        for scheme, error in measured[label].failed.items() if label in measured else ():
            yield Skipped(label, scheme, error.message)


def load(source: str | Path, *, watch: Watch = SILENT) -> Audit:
    """Read a saved audit: a folder, its audit.json, or a published one (`org/name@revision`)."""
    folder = Path(source)
    if not folder.exists():
        from qaudit.hub.publish import audit_folder

        folder = audit_folder(str(source), watch)
    return Audit(read_audit(folder), folder if folder.is_dir() else folder.parent, str(source))


def gate(
    audit: Audit | str | Path,
    policy: str = "release",
    baseline: Audit | str | Path | None = None,
    bits: Sequence[str] = (),
    *,
    signed: bool = False,
) -> Gate:
    """Hold an audit to a policy, a preset or a file; `bits` names the classes to decide.

    `signed` refuses audits that are not signed with the key in `QAUDIT_SIGNING_KEY`.
    """

    def held(opened: Audit) -> GateInput:
        if signed:
            must_be_signed(opened.record, opened.folder)
        saved, name = opened.evidence.checked(), opened.name or str(opened.folder)
        return GateInput.of(saved.audit, saved.table, name, tuple(bits))

    rules, opened = policy_named(policy), _opened(audit)
    before = None if baseline is None else _opened(baseline)
    answer = gate_measurements(
        rules,
        held(opened),
        None if before is None else held(before),
        today=datetime.now(UTC).date(),
        targets=opened.plan.recipe.targets,
    )
    return replace(answer, next_step=next_step(opened.record, answer.classes, policy))


def pick(
    *audits: Audit | str | Path, objective: str = "loss", bits: Sequence[str] = ()
) -> Pick | None:
    """Choose the one subject and scheme to ship from one or several audits."""
    opened = [*map(_opened, audits)]
    joined = combine({str(audit.folder): audit.evidence for audit in opened})
    wanted = parse_objective(objective)
    return GateInput(joined.table, bits=tuple(bits), objective=wanted).pick


def decide(
    saved: SavedAudit,
    policy: str | Policy,
    objective: str = "loss",
    bits: Sequence[str] = (),
    *,
    today: date | None = None,
) -> Verdict:
    """Return the verdict on each bit class, by evidence and under a policy, as of a day."""
    wanted = parse_objective(objective)
    rules = policy_named(policy) if isinstance(policy, str) else policy
    named = policy if isinstance(policy, str) else rules.path or rules.name
    held = GateInput.of(saved.audit, saved.table, "audit", tuple(bits), wanted)
    judgement = gate_measurements(rules, held, today=today or datetime.now(UTC).date())
    verdict = verdict_of(judgement, str(wanted))
    return replace(verdict, next_step=next_step(saved.audit, verdict.classes, named))


def _opened(audit: Audit | str | Path) -> Audit:
    return audit if isinstance(audit, Audit) else load(audit)
