"""`audit.json` and plans: the documents that others build on, and back, without torch.

Within one version of the schema names are only added, and an audit that was written before a name
was added is read without it. A checkpoint is written once, in `plan.checkpoints`; members point
there by index, and top-level `subjects` repeat what people look for.

Evidence counts only if its bytes have the hash that is in the audit, and if the file itself names
the scheme and the draw that the audit has it for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from qaudit.errors import AuditError, SourceError, UsageError
from qaudit.saved.codec import EDITED, decode, encode, parse, text_of
from qaudit.saved.documents import (
    AuditDocument,
    MeasuredPlanDocument,
    MemberDocument,
    PlanDocument,
    SubjectDocument,
    SubjectSummary,
)
from qaudit.saved.results import OtherContentError, read_measurement
from qaudit.types import (
    AuditRecord,
    Checkpoint,
    Measurement,
    MeasurementRow,
    Plan,
    Subject,
    TaskRow,
)
from qaudit.whole import read_regular

SCHEMA = "1"

FILE = "audit.json"
LARGEST_NBYTES = 256 * 2**20
"""Of an audit: a thousand subjects under eight schemes take about ten megabytes."""

_AGAIN = "run the same scan again: what is missing is measured again"

# ---------------------------------------------------------------------------------------- writing


def to_json(audit: AuditRecord) -> str:
    """Write an audit."""
    checkpoints = checkpoints_of((*audit.plan.subjects, *audit.plan.releases, *audit.subjects))
    tables = {field.name: getattr(audit, field.name) for field in fields(AuditDocument)}
    plan = _plan_fields(audit.plan, checkpoints)
    tables["plan"] = MeasuredPlanDocument(**plan, protocol=audit.protocol)
    tables["subjects"] = tuple(_summary(subject, checkpoints) for subject in audit.subjects)
    document = encode(AuditDocument(**tables))
    document["diagnostics"] = {k: rows for k, rows in document["diagnostics"].items() if rows}
    return text_of(document)


def plan_to_json(plan: Plan) -> str:
    """Write a plan on its own, under the names that it has in an audit."""
    return text_of(encode(plan_document(plan)))


def plan_document(plan: Plan) -> PlanDocument:
    """Return a plan as it is written."""
    checkpoints = checkpoints_of((*plan.subjects, *plan.releases))
    return PlanDocument(**_plan_fields(plan, checkpoints))


def checkpoints_of(subjects: Sequence[Subject]) -> tuple[Checkpoint, ...]:
    """Return every member of the subjects once, in their order."""
    return tuple(dict.fromkeys(c for subject in subjects for c, _ in subject.members))


def pointers(subject: Subject, checkpoints: Sequence[Checkpoint]) -> SubjectDocument:
    """Return a subject whose members point into a list of checkpoints."""
    places = {checkpoint: place for place, checkpoint in enumerate(checkpoints)}
    members = tuple(MemberDocument(c.label, weight, places[c]) for c, weight in subject.members)
    return SubjectDocument(subject.label, subject.merge, members)


def _plan_fields(plan: Plan, checkpoints: tuple[Checkpoint, ...]) -> dict[str, Any]:
    return {
        **{field.name: getattr(plan, field.name) for field in fields(Plan)},
        "passes": plan.streams,
        "subjects": tuple(pointers(subject, checkpoints) for subject in plan.subjects),
        "releases": tuple(pointers(release, checkpoints) for release in plan.releases),
        "checkpoints": checkpoints,
    }


def _summary(subject: Subject, checkpoints: Sequence[Checkpoint]) -> SubjectSummary:
    alone = subject.kind == "checkpoint"
    checkpoint = subject.first
    return SubjectSummary(
        **vars(pointers(subject, checkpoints)),
        kind=subject.kind,
        revision=checkpoint.ref.revision if alone else None,
        commit=checkpoint.commit if alone else None,
        stage=checkpoint.stage if alone else None,
        step=checkpoint.step if alone else None,
        tokens_seen=checkpoint.tokens if alone else None,
        learning_rate=checkpoint.learning_rate if alone else None,
        content=subject.content,
    )


# ---------------------------------------------------------------------------------------- reading


def read_audit(path: Path) -> AuditRecord:
    """Read the audit in an output folder, or the one in a file."""
    file = path / FILE if path.is_dir() else path
    if not file.exists():
        raise AuditError(
            f"there is no audit at `{path}`", hint="name an output folder of `qaudit scan`"
        )
    try:
        text = read_regular(file, LARGEST_NBYTES).decode()
    except (OSError, ValueError) as error:
        raise AuditError(f"`{file}` cannot be read: {error}", hint=EDITED) from error
    return from_json(text)


def from_json(text: str) -> AuditRecord:
    """Read an audit of this version; refuse a truncated, foreign or future one."""
    try:
        document = parse(text)
    except ValueError as error:
        raise AuditError(
            f"the audit is not whole JSON: {error}",
            hint="it may be truncated: run the same scan again to have it written anew",
        ) from error
    _check_version(document)
    read = decode(AuditDocument, document, "audit")
    checkpoints = read.plan.checkpoints
    tables = {field.name: getattr(read, field.name) for field in fields(AuditDocument)}
    tables["subjects"] = subjects_in(read.subjects, checkpoints, "audit.subjects")
    audit = AuditRecord(**{**tables, "plan": plan_of(read.plan), "protocol": read.plan.protocol})
    _check_labels(audit)
    return audit


def subjects_in(
    documents: Sequence[SubjectDocument], checkpoints: Sequence[Checkpoint], where: str
) -> tuple[Subject, ...]:
    """Return subjects with the checkpoints that their members point to."""
    return tuple(
        _subject(document, checkpoints, f"{where}[{place}].members")
        for place, document in enumerate(documents)
    )


def _subject(document: SubjectDocument, checkpoints: Sequence[Checkpoint], where: str) -> Subject:
    if not document.members:
        raise AuditError(f"`{where}` is empty", hint=EDITED)
    for place, member in enumerate(document.members):
        if not 0 <= member.checkpoint < len(checkpoints):
            raise AuditError(f"`{where}[{place}].checkpoint` points to no checkpoint", hint=EDITED)
    members = tuple((checkpoints[m.checkpoint], m.weight) for m in document.members)
    return Subject(document.label, members, document.merge)


def plan_of(document: PlanDocument) -> Plan:
    """Return a plan as it was written; its passes are not among that."""
    if not 0 < document.recipe.confidence < 1:
        raise AuditError("`audit.plan.recipe.confidence` is not between 0 and 1", hint=EDITED)
    known = {field.name: getattr(document, field.name) for field in fields(Plan)}
    for name in ("subjects", "releases"):
        known[name] = subjects_in(known[name], document.checkpoints, f"audit.plan.{name}")
    return Plan(**{**known, "streams": document.passes, "passes": ()})


def _check_version(document: Any) -> None:
    if not isinstance(document, dict) or not {"schema", "qaudit", "plan"} <= document.keys():
        raise AuditError(
            "this is not an audit of qaudit", hint="name the `audit.json` of an output folder"
        )
    version = document["schema"]
    if not isinstance(version, str) or not version.isdecimal() or len(version) > 6:
        raise AuditError(f"the audit's schema version `{version}` is unknown", hint=EDITED)
    if int(version) > int(SCHEMA):
        raise AuditError(
            f"the audit has schema version {version}, this qaudit reads up to {SCHEMA}",
            hint=f"install qaudit {document['qaudit']} or later",
        )


def _check_labels(audit: AuditRecord) -> None:
    labels = {subject.label for subject in audit.subjects}
    measured = {(row.subject, row.scheme) for row in audit.measurements}
    for subject in [s for s, _ in measured] + [row.subject for row in audit.pooled]:
        if subject not in labels:
            raise AuditError(
                f"the audit measures `{subject}`, which is none of its subjects", hint=EDITED
            )
    if audit.pick is not None and (audit.pick.subject, audit.pick.scheme) not in measured:
        raise AuditError(
            f"the audit picks `{audit.pick.subject}` under `{audit.pick.scheme}`, "
            "which it did not measure",
            hint=EDITED,
        )


# --------------------------------------------------------------------------- with its evidence


@dataclass(frozen=True, eq=False)
class SavedAudit:
    """An audit and the measurements it was made from."""

    audit: AuditRecord
    measurements: tuple[Measurement, ...]


def read_saved(path: Path) -> SavedAudit:
    """Read an output folder, or the `audit.json` in one, with all of its evidence."""
    audit = read_audit(path)
    folder = path if path.is_dir() else path.parent
    tasks: dict[tuple[str, str], list[TaskRow]] = defaultdict(list)
    for row in audit.tasks:
        if row.evidence:
            tasks[row.subject, row.scheme].append(row)
    return SavedAudit(
        audit,
        tuple(
            _with_tasks(_measurement(row, folder), tasks.get((row.subject, row.scheme), ()), folder)
            for row in audit.measurements
        ),
    )


def _with_tasks(measured: Measurement, rows: Iterable[TaskRow], folder: Path) -> Measurement:
    """Return a measurement with the items of its tasks, each of which has a file of its own."""
    parts = tuple(part for row in rows for part in _read_evidence(row, folder).evidence.tasks)
    if not parts:
        return measured
    return replace(measured, evidence=replace(measured.evidence, tasks=parts))


def _measurement(row: MeasurementRow, folder: Path) -> Measurement:
    measurement = _read_evidence(row, folder)
    for name in ("spec", "calibration_seed", "bits_per_weight", "nbytes"):
        if getattr(measurement, name) != getattr(row, name):
            raise AuditError(
                f"the evidence of `{row.subject}` under `{row.scheme}` is of `{name}` "
                f"{getattr(measurement, name)}, and the audit has {getattr(row, name)}",
                hint=EDITED,
            )
    # Two names of the same weights share one file, which has one of them.
    return replace(measurement, subject=row.subject, scheme=row.scheme)


def _read_evidence(row: MeasurementRow | TaskRow, folder: Path) -> Measurement:
    path = folder / row.evidence
    try:
        # The file itself may be a link, as in the shared cache: its bytes are hashed.
        inside = path.parent.resolve().is_relative_to(folder.resolve())
        if not inside or path.name in ("", ".."):
            raise SourceError(
                f"the evidence of `{row.subject}` under `{row.scheme}` is outside the audit",
                hint=EDITED,
            )
        return read_measurement(path, row.evidence_sha256)
    except OtherContentError as error:
        raise SourceError(
            f"`{path}` is not the evidence that the audit was made from", hint=_AGAIN
        ) from error
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise SourceError(f"`{path}` cannot be read: {error}", hint=_AGAIN) from error


def combine(audits: Mapping[str, SavedAudit]) -> SavedAudit:
    """Join audits of the same text and precision; equal labels get the names of their audits."""
    (first_name, first), *others = audits.items()
    for name, other in others:
        for setting in ("dtype", "context"):
            a, b = getattr(first.audit.plan, setting), getattr(other.audit.plan, setting)
            if a != b:
                raise UsageError(
                    f"`{first_name}` was measured with {setting} {a} and `{name}` with {b}",
                    hint="measure both alike; such numbers do not compare",
                )
    times = Counter(s.label for saved in audits.values() for s in saved.audit.subjects)

    def label(name: str, old: str) -> str:
        return f"{name}/{old}" if times[old] > 1 else old

    def joined(rows: Callable[[SavedAudit], Iterable[Any]]) -> tuple[Any, ...]:
        return tuple(
            replace(row, subject=label(name, row.subject))
            for name, saved in audits.items()
            for row in rows(saved)
        )

    audit = replace(
        first.audit,
        subjects=tuple(
            replace(subject, label=label(name, subject.label))
            for name, saved in audits.items()
            for subject in saved.audit.subjects
        ),
        measurements=joined(lambda saved: saved.audit.measurements),
        pooled=joined(lambda saved: saved.audit.pooled),
    )
    return SavedAudit(audit, joined(lambda saved: saved.measurements))
