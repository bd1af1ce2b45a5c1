"""`audit.json`: the names others may build on, and back.

The published schema is `audit.schema.json`, one folder up. Within one version names are only
added; a reader ignores what it does not know, and an audit that was written before a name was
added is read without it.

Top-level `subjects` repeats of each checkpoint what people look for; the whole of it stands
once, in `plan.checkpoints`, and members point there by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qaudit.core.foreign import json_of
from qaudit.errors import AuditError
from qaudit.saved.decode import EDITED, Row
from qaudit.saved.rows import (
    checkpoints_of,
    finding_in,
    interval_in,
    named_interval,
    number_in,
    plain_interval,
    pointers,
    row_of,
    subject_in,
    text_of,
)
from qaudit.types import (
    Audit,
    Checkpoint,
    Comparison,
    MeasurementRow,
    Pick,
    Plan,
    PooledRow,
    Skipped,
    Subject,
    TaskRow,
)

SCHEMA = "1"


def to_json(audit: Audit) -> str:
    """Write an audit."""
    checkpoints = checkpoints_of((*audit.plan.subjects, *audit.plan.releases, *audit.subjects))
    document = {
        "schema": audit.schema,
        "qaudit": audit.qaudit,
        "plan": {**_plan_row(audit.plan, checkpoints), "protocol": audit.protocol},
        "environment": audit.environment,
        "subjects": [_subject_row(s, checkpoints) for s in audit.subjects],
        "measurements": [row_of(score) for score in audit.measurements],
        "pooled": [row_of(pooled) for pooled in audit.pooled],
        "comparisons": [row_of(comparison) for comparison in audit.comparisons],
        "diagnostics": audit.diagnostics,
        "findings": [row_of(finding) for finding in audit.findings],
        "pick": None if audit.pick is None else row_of(audit.pick),
        "skipped": [row_of(skipped) for skipped in audit.skipped],
        "tasks": [row_of(task) for task in audit.tasks],
    }
    return text_of(document)


def plan_to_json(plan: Plan) -> str:
    """Write a plan on its own, under the names that it has in an audit."""
    return text_of(_plan_row(plan, checkpoints_of((*plan.subjects, *plan.releases))))


def from_json(text: str) -> Audit:
    """Read an audit of this version; refuse a truncated, foreign or future one."""
    try:
        document = json_of(text)
    except ValueError as error:
        raise AuditError(
            f"the audit is not whole JSON: {error}",
            hint="it may be truncated: run the same scan again to have it written anew",
        ) from error
    _check_version(document)
    top = Row(document, "audit")
    plan = top.row("plan")
    checkpoints = tuple(row.build(Checkpoint) for row in plan.rows("checkpoints"))
    protocol = dict(plan.row("protocol").values)
    audit = Audit(
        plan=_plan(plan, checkpoints),
        environment=dict(top.row("environment").values),
        protocol=protocol,
        subjects=tuple(subject_in(row, checkpoints) for row in top.rows("subjects")),
        measurements=tuple(_score(row) for row in top.rows("measurements")),
        pooled=tuple(map(_pooled, top.rows("pooled") if "pooled" in top.values else ())),
        tasks=tuple(_task(row) for row in top.rows("tasks")),
        comparisons=tuple(
            row.build(Comparison, {"interval": plain_interval(row)})
            for row in top.rows("comparisons")
        ),
        findings=tuple(finding_in(row) for row in top.rows("findings")),
        pick=None if top.value("pick") is None else _pick(top.row("pick")),
        skipped=tuple(row.build(Skipped) for row in top.rows("skipped")),
        diagnostics=dict(top.row("diagnostics").values),
        schema=top.text("schema"),
        qaudit=top.text("qaudit"),
    )
    _check_labels(audit)
    return audit


# --------------------------------------------------------------------- writing


def _plan_row(plan: Plan, checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    row = row_of(plan)
    row["subjects"] = [pointers(subject, checkpoints) for subject in plan.subjects]
    row["releases"] = [pointers(release, checkpoints) for release in plan.releases]
    row["checkpoints"] = [row_of(checkpoint) for checkpoint in checkpoints]
    return row


def _subject_row(subject: Subject, checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    alone = subject.first if subject.kind == "checkpoint" else None
    return {
        "label": subject.label,
        "kind": subject.kind,
        "revision": alone and alone.ref.revision,
        "commit": alone and alone.commit,
        "stage": alone and alone.stage,
        "step": alone and alone.step,
        "tokens_seen": alone and alone.tokens,
        "learning_rate": alone and alone.learning_rate,
        "content": subject.content,
        **pointers(subject, checkpoints),
    }


# --------------------------------------------------------------------- reading


def _check_version(document: Any) -> None:
    if not isinstance(document, dict) or not {"schema", "qaudit", "plan"} <= document.keys():
        raise AuditError(
            "this is not an audit of qaudit", hint="name the `audit.json` of an output folder"
        )
    version = document["schema"]
    if not isinstance(version, str) or not version.isdecimal():
        raise AuditError(f"the audit's schema version `{version}` is none of ours", hint=EDITED)
    if int(version) > int(SCHEMA):
        raise AuditError(
            f"the audit has schema version {version}, this qaudit reads up to {SCHEMA}",
            hint=f"install qaudit {document['qaudit']} or later",
        )


def _check_labels(audit: Audit) -> None:
    labels = {subject.label for subject in audit.subjects}
    for subject in [s.subject for s in audit.measurements] + [p.subject for p in audit.pooled]:
        if subject not in labels:
            raise AuditError(
                f"the audit measures `{subject}`, which is none of its subjects",
                hint=EDITED,
            )
    measured = {(score.subject, score.scheme) for score in audit.measurements}
    if audit.pick is not None and (audit.pick.subject, audit.pick.scheme) not in measured:
        raise AuditError(
            f"the audit picks `{audit.pick.subject}` under `{audit.pick.scheme}`, "
            "which it did not measure",
            hint=EDITED,
        )


def _plan(row: Row, checkpoints: tuple[Checkpoint, ...]) -> Plan:
    known: dict[str, Any] = {
        "subjects": tuple(subject_in(inner, checkpoints) for inner in row.rows("subjects"))
    }
    if "nbytes_memory_fixed" not in row.values:
        known["nbytes_memory_fixed"] = 0  # the first audits do not say, and only a run asks
    if "releases" in row.values:
        rows = row.rows("releases")
        known["releases"] = tuple(subject_in(inner, checkpoints) for inner in rows)
    if "findings" in row.values:
        known["findings"] = tuple(map(finding_in, row.rows("findings")))
    return row.build(Plan, known)


def _score(row: Row) -> MeasurementRow:
    return row.build(MeasurementRow, _numbers(row))


def _pooled(row: Row) -> PooledRow:
    return row.build(PooledRow, _numbers(row))


def _numbers(row: Row) -> dict[str, Any]:
    return {
        "ce": interval_in(row, "ce", "ce_low", "ce_high"),
        "relative_error": named_interval(row, "relative_error"),
        "absolute_change": named_interval(row, "absolute_change"),
        "perplexity": number_in(row, "perplexity"),
    }


def _task(row: Row) -> TaskRow:
    accuracy = interval_in(row, "accuracy", "accuracy_low", "accuracy_high")
    drop = named_interval(row, "accuracy_drop")
    return row.build(TaskRow, {"accuracy": accuracy, "accuracy_drop": drop})


def _pick(row: Row) -> Pick:
    present = row.value("estimate") is not None
    return row.build(Pick, {"interval": plain_interval(row) if present else None})
