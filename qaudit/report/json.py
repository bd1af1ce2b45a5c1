"""`audit.json`: the names others may build on, and back.

The published schema is `audit.schema.json` beside this file. Within one version names are only
added; a reader ignores what it does not know. JSON has no infinity and no NaN: a number that is
not finite is written as null, and read back as the infinity that it was.

Top-level `subjects` repeats of each checkpoint what people look for; the whole of it stands
once, in `plan.checkpoints`, and members point there by index.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from typing import Any

from qaudit.errors import AuditError
from qaudit.report.decode import EDITED, Row, decode
from qaudit.types import (
    Audit,
    Checkpoint,
    Comparison,
    Finding,
    Interval,
    Pick,
    Plan,
    Score,
    Skipped,
    Subject,
    TaskScore,
)

SCHEMA = "1"
INTERVALS = ("ce", "relative_error", "absolute_change", "accuracy", "accuracy_drop")
"""Written as three numbers: `ce`, `ce_low`, `ce_high`. Others are `estimate`, `low`, `high`."""


def to_json(audit: Audit) -> str:
    """Write an audit."""
    checkpoints = _checkpoints((*audit.plan.subjects, *audit.subjects))
    document = {
        "schema": audit.schema,
        "qaudit": audit.qaudit,
        "plan": {**_plan_row(audit.plan, checkpoints), "protocol": audit.protocol},
        "environment": audit.environment,
        "subjects": [_subject_row(s, checkpoints) for s in audit.subjects],
        "measurements": [_row(score) for score in audit.scores],
        "comparisons": [_row(comparison) for comparison in audit.comparisons],
        "diagnostics": audit.diagnostics,
        "findings": [_row(finding) for finding in audit.findings],
        "pick": None if audit.pick is None else _row(audit.pick),
        "skipped": [_row(skipped) for skipped in audit.skipped],
        "tasks": [_row(task) for task in audit.tasks],
    }
    return _text(document)


def plan_to_json(plan: Plan) -> str:
    """Write a plan on its own, under the names that it has in an audit."""
    return _text(_plan_row(plan, _checkpoints(plan.subjects)))


def from_json(text: str) -> Audit:
    """Read an audit of this version; refuse a truncated, foreign or future one."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AuditError(
            f"the audit is not whole JSON: {error}",
            hint="it may be truncated: run the same scan again to have it written anew",
        ) from error
    _check_version(document)
    top = Row(document, "audit")
    plan = top.row("plan")
    checkpoints = tuple(row.build(Checkpoint) for row in plan.rows("checkpoints"))
    protocol = dict(plan.row("protocol").values)
    subjects = {"subjects": tuple(_subject(row, checkpoints) for row in plan.rows("subjects"))}
    audit = Audit(
        plan=plan.build(Plan, subjects),
        environment=dict(top.row("environment").values),
        protocol=protocol,
        subjects=tuple(_subject(row, checkpoints) for row in top.rows("subjects")),
        scores=tuple(_score(row) for row in top.rows("measurements")),
        tasks=tuple(_task(row) for row in top.rows("tasks")),
        comparisons=tuple(
            row.build(Comparison, {"interval": _plain(row)}) for row in top.rows("comparisons")
        ),
        findings=tuple(_finding(row) for row in top.rows("findings")),
        pick=None if top.value("pick") is None else _pick(top.row("pick")),
        skipped=tuple(row.build(Skipped) for row in top.rows("skipped")),
        diagnostics=dict(top.row("diagnostics").values),
        schema=top.text("schema"),
        qaudit=top.text("qaudit"),
    )
    _check_labels(audit)
    return audit


# --------------------------------------------------------------------- writing


def _text(document: dict[str, Any]) -> str:
    return json.dumps(_strict(document), indent=1, allow_nan=False) + "\n"


def _checkpoints(subjects: tuple[Subject, ...]) -> list[Checkpoint]:
    return list(dict.fromkeys(c for subject in subjects for c, _ in subject.members))


def _plan_row(plan: Plan, checkpoints: list[Checkpoint]) -> dict[str, Any]:
    row = _row(plan)
    row["subjects"] = [_pointers(subject, checkpoints) for subject in plan.subjects]
    row["checkpoints"] = [_row(checkpoint) for checkpoint in checkpoints]
    return row


def _row(value: object) -> dict[str, Any]:
    """Spread a dataclass into a row; intervals become three numbers."""
    row: dict[str, Any] = {}
    for field in fields(value):  # type: ignore[arg-type]
        content = getattr(value, field.name)
        if field.name == "interval":
            row.update(_numbers("estimate", "low", "high", content))
        elif field.name in INTERVALS:
            row.update(_numbers(field.name, f"{field.name}_low", f"{field.name}_high", content))
        elif field.name == "subjects":
            continue  # of a plan: written as pointers to checkpoints
        elif hasattr(content, "__dataclass_fields__"):
            row[field.name] = asdict(content)
        else:
            row[field.name] = content
    if isinstance(value, Checkpoint):
        row["files"] = [asdict(file) for file in value.files]
        row["ref"] = asdict(value.ref)
    return row


def _numbers(estimate: str, low: str, high: str, found: Interval | None) -> dict[str, Any]:
    if found is None:
        return {estimate: None, low: None, high: None}
    return {estimate: found.estimate, low: found.low, high: found.high}


def _pointers(subject: Subject, checkpoints: list[Checkpoint]) -> dict[str, Any]:
    members = [
        {"label": c.label, "weight": weight, "checkpoint": checkpoints.index(c)}
        for c, weight in subject.members
    ]
    return {"label": subject.label, "merge": subject.merge, "members": members}


def _subject_row(subject: Subject, checkpoints: list[Checkpoint]) -> dict[str, Any]:
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
        **_pointers(subject, checkpoints),
    }


def _strict(value: Any) -> Any:
    """Replace what JSON cannot say: tuples by lists, numbers that are not finite by null."""
    if isinstance(value, dict):
        return {str(key): _strict(content) for key, content in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(content) for content in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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
    for score in audit.scores:
        if score.subject not in labels:
            raise AuditError(
                f"the audit measures `{score.subject}`, which is none of its subjects",
                hint=EDITED,
            )


def _subject(row: Row, checkpoints: tuple[Checkpoint, ...]) -> Subject:
    members = []
    for member in row.rows("members"):
        index = decode(member.value("checkpoint"), int, member.path("checkpoint"))
        if not 0 <= index < len(checkpoints):
            raise AuditError(f"`{member.path('checkpoint')}` points to no checkpoint", hint=EDITED)
        weight = decode(member.value("weight"), float, member.path("weight"))
        members.append((checkpoints[index], weight))
    if not members:
        raise AuditError(f"`{row.path('members')}` is empty", hint=EDITED)
    merge = decode(row.value("merge"), str | None, row.path("merge"))
    return Subject(row.text("label"), tuple(members), merge)


def _score(row: Row) -> Score:
    known = {
        "ce": _interval(row, "ce", "ce_low", "ce_high"),
        "relative_error": _named(row, "relative_error"),
        "absolute_change": _named(row, "absolute_change"),
        "perplexity": _finite_or(row, "perplexity"),
    }
    return row.build(Score, known)


def _task(row: Row) -> TaskScore:
    accuracy = _interval(row, "accuracy", "accuracy_low", "accuracy_high")
    drop = _named(row, "accuracy_drop")
    return row.build(TaskScore, {"accuracy": accuracy, "accuracy_drop": drop})


def _finding(row: Row) -> Finding:
    present = row.value("estimate") is not None
    return row.build(Finding, {"interval": _plain(row) if present else None})


def _pick(row: Row) -> Pick:
    present = row.value("estimate") is not None
    return row.build(Pick, {"interval": _plain(row) if present else None})


def _plain(row: Row) -> Interval:
    return _interval(row, "estimate", "low", "high")


def _named(row: Row, name: str) -> Interval | None:
    if row.value(name) is None:
        return None
    return _interval(row, name, f"{name}_low", f"{name}_high")


def _interval(row: Row, estimate: str, low: str, high: str) -> Interval:
    return Interval(
        _finite_or(row, estimate), _finite_or(row, low, -math.inf), _finite_or(row, high)
    )


def _finite_or(row: Row, name: str, otherwise: float = math.inf) -> float:
    found = decode(row.value(name), float | None, row.path(name))
    return otherwise if found is None else found
