"""`audit.json`: the document that others build on, and back, without torch.

Top-level `subjects` repeat what people look for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from qaudit.errors import AuditError
from qaudit.saved.codec import EDITED, decode, encode, parse, refuse_other_schema, text_of
from qaudit.saved.documents import AuditDocument, MeasuredPlanDocument, SubjectSummary
from qaudit.saved.parts import refuse_unfinished
from qaudit.saved.plans import (
    FILE,
    LARGEST_NBYTES,
    checkpoints_of,
    plan_fields,
    plan_of,
    pointers,
    subjects_in,
)
from qaudit.types import AuditRecord, Checkpoint, Subject
from qaudit.whole import read_regular


def to_json(audit: AuditRecord) -> str:
    checkpoints = checkpoints_of((*audit.plan.subjects, *audit.plan.releases, *audit.subjects))
    tables = {field.name: getattr(audit, field.name) for field in fields(AuditDocument)}
    plan = plan_fields(audit.plan, checkpoints)
    tables["plan"] = MeasuredPlanDocument(**plan, protocol=audit.protocol)
    tables["subjects"] = tuple(_summary(subject, checkpoints) for subject in audit.subjects)
    document = encode(AuditDocument(**tables))
    document["diagnostics"] = {k: rows for k, rows in document["diagnostics"].items() if rows}
    return text_of(document)


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
        configuration=subject.first.label,
    )


def read_audit(path: Path) -> AuditRecord:
    """Read the audit in an output folder, or the one in a file."""
    file = path / FILE if path.is_dir() else path
    if not file.exists():
        refuse_unfinished(file.parent)
        raise AuditError(
            f"there is no audit at `{path}`", hint="name an output folder of `qaudit scan`"
        )
    try:
        text = read_regular(file, LARGEST_NBYTES).decode()
    except (OSError, ValueError) as error:
        raise AuditError(f"`{file}` cannot be read: {error}", hint=EDITED) from error
    if file.suffix != ".json":
        hint = "name an output folder of `qaudit scan`, or the `audit.json` in one"
        raise AuditError(f"`{file}` is not an audit", hint=hint)
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


def _check_version(document: Any) -> None:
    if not isinstance(document, dict) or not {"schema", "qaudit", "plan"} <= document.keys():
        raise AuditError(
            "this is not an audit of qaudit", hint="name the `audit.json` of an output folder"
        )
    refuse_other_schema(document, "the audit", EDITED)


def _check_labels(audit: AuditRecord) -> None:
    labels = {subject.label for subject in audit.subjects}
    measured = {(row.subject, row.scheme) for row in audit.measurements}
    for subject, _ in measured:
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
