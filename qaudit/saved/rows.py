"""Frozen values as rows of JSON, and back: what an audit and a lock have in common.

A dataclass becomes an object with its fields; an interval becomes three numbers; a subject
points to its checkpoints by index, so that each of them stands once. JSON has no infinity and
no NaN: a number that is not finite is written as null, and read back as the infinity it was.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from qaudit.errors import AuditError
from qaudit.saved.decode import EDITED, Row, decode
from qaudit.types import Checkpoint, Finding, Interval, Subject

INTERVALS = (
    "ce", "relative_error", "absolute_change", "accuracy", "accuracy_drop", "share",
    "trace", "trace_elsewhere",
)  # fmt: skip
"""Written as three numbers: `ce`, `ce_low`, `ce_high`. Others are `estimate`, `low`, `high`."""

_CODE = re.compile(r"[A-Z]{2}[0-9]{3}")

# --------------------------------------------------------------------- writing


def text_of(document: dict[str, Any]) -> str:
    """Write a document, without anything that JSON does not know."""
    return json.dumps(_strict(document), indent=1, allow_nan=False) + "\n"


def row_of(value: object) -> dict[str, Any]:
    """Spread a dataclass into a row; intervals become three numbers."""
    row: dict[str, Any] = {}
    for field in fields(value):  # type: ignore[arg-type]
        content = getattr(value, field.name)
        if field.name == "interval":
            row.update(_numbers("estimate", "low", "high", content))
        elif field.name in INTERVALS:
            row.update(_numbers(field.name, f"{field.name}_low", f"{field.name}_high", content))
        elif field.name in ("subjects", "releases"):
            continue  # of a plan: written as pointers to checkpoints
        elif isinstance(content, tuple):
            row[field.name] = [row_of(c) if is_dataclass(c) else c for c in content]
        elif is_dataclass(content):
            row[field.name] = asdict(content)  # type: ignore[arg-type]
        else:
            row[field.name] = content
    return row


def _numbers(estimate: str, low: str, high: str, found: Interval | None) -> dict[str, Any]:
    if found is None:
        return {estimate: None, low: None, high: None}
    return {estimate: found.estimate, low: found.low, high: found.high}


def checkpoints_of(subjects: Sequence[Subject]) -> list[Checkpoint]:
    """Return every member of the subjects once, in their order."""
    return list(dict.fromkeys(c for subject in subjects for c, _ in subject.members))


def pointers(subject: Subject, checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    """Write a subject whose members point into a list of checkpoints."""
    members = [
        {"label": c.label, "weight": weight, "checkpoint": checkpoints.index(c)}
        for c, weight in subject.members
    ]
    return {"label": subject.label, "merge": subject.merge, "members": members}


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


def subject_in(row: Row, checkpoints: Sequence[Checkpoint]) -> Subject:
    """Read a subject whose members point into a list of checkpoints."""
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


def finding_in(row: Row) -> Finding:
    """Read a finding, with its interval if it has one."""
    present = row.value("estimate") is not None
    found = row.build(Finding, {"interval": plain_interval(row) if present else None})
    if not _CODE.fullmatch(found.rule):  # it stands unescaped wherever findings are listed
        raise AuditError(f"`{row.path('rule')}` is no code of a rule", hint=EDITED)
    return found


def plain_interval(row: Row) -> Interval:
    """Read `estimate`, `low` and `high`."""
    return interval_in(row, "estimate", "low", "high")


def named_interval(row: Row, name: str) -> Interval | None:
    """Read an interval of `INTERVALS`, or nothing where there is none."""
    if row.value(name) is None:
        return None
    return interval_in(row, name, f"{name}_low", f"{name}_high")


def interval_in(row: Row, estimate: str, low: str, high: str) -> Interval:
    """Read three numbers; null is the infinity that it was."""
    return Interval(number_in(row, estimate), number_in(row, low, -math.inf), number_in(row, high))


def number_in(row: Row, name: str, otherwise: float = math.inf) -> float:
    """Read a number, or `otherwise` for null."""
    found = decode(row.value(name), float | None, row.path(name))
    return otherwise if found is None else found
