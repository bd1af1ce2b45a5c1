"""`audit.json`, the document that others build on, and back, without torch.

It differs from the types where subjects point to checkpoints; top-level `subjects` repeat what
people look for. The published schemas are made from these dataclasses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any, Literal

from qaudit.errors import AuditError
from qaudit.saved import codec
from qaudit.saved.parts import Failure, refuse_unfinished
from qaudit.types import (
    AuditRecord,
    Check,
    Checkpoint,
    CheckStanding,
    ClassVerdict,
    Finding,
    NextStep,
    Plan,
    Subject,
)
from qaudit.whole import read_regular


@dataclass(frozen=True)
class MemberDocument:
    """A member of a subject; `checkpoint` is an index into `plan.checkpoints`."""

    label: str
    weight: float
    checkpoint: int


@dataclass(frozen=True)
class SubjectDocument:
    """A subject whose members point into a list of checkpoints."""

    label: str
    merge: str | None
    members: tuple[MemberDocument, ...]


@dataclass(frozen=True, kw_only=True)
class SubjectSummary(SubjectDocument):
    """A subject with what people look for; of a soup, the fields of a checkpoint are null."""

    kind: Literal["checkpoint", "soup"]
    revision: str | None
    commit: str | None
    stage: str | None
    step: int | None
    tokens_seen: int | None
    learning_rate: float | None
    content: str
    configuration: str = ""  # the member whose configuration it is run with


@dataclass(frozen=True, kw_only=True)
class PlanDocument(Plan):
    """A plan whose subjects point into its checkpoints."""

    subjects: tuple[SubjectDocument, ...]  # type: ignore[assignment]
    passes: tuple[()] = ()  # not written
    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True, kw_only=True)
class MeasuredPlanDocument(PlanDocument):
    """The plan of an audit, with the protocol that its text was cut by."""

    protocol: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AuditDocument(AuditRecord):
    """An audit; `measurements` are unique by subject, spec and calibration_seed."""

    plan: MeasuredPlanDocument
    subjects: tuple[SubjectSummary, ...]  # type: ignore[assignment]


@dataclass(frozen=True)
class PolicyName:
    """A policy; `path` is null for a preset."""

    name: str
    path: str | None


@dataclass(frozen=True)
class IgnoreNote:
    """The ignore of a policy that a check falls under."""

    reason: str
    until: date
    line: int


@dataclass(frozen=True, kw_only=True)
class CheckDocument(Check):
    """A check; `standing` is its outcome, if it counts."""

    ignored: IgnoreNote | None  # type: ignore[assignment]
    standing: CheckStanding


@dataclass(frozen=True)
class GateAnswer:
    """A policy held against an audit; `checks` has the worst first."""

    schema: Literal["1"]
    qaudit: str
    verdict: Literal["pass", "fail", "inconclusive", "incomplete"]
    exit_code: Literal[0, 1, 3]
    policy: PolicyName
    confidence: float
    at_once: int
    baseline: str | None
    targets: tuple[str, ...]
    counts: dict[CheckStanding, int]
    checks: tuple[CheckDocument, ...]
    classes: tuple[ClassVerdict, ...]
    warnings: tuple[Finding, ...]
    next_step: NextStep | None
    error: None


@dataclass(frozen=True)
class GateFailure:
    """What is written where there is no answer."""

    schema: Literal["1"]
    qaudit: str
    verdict: Literal["error"]
    exit_code: Literal[2, 4, 130]
    error: Failure


FOLDER = Path(__file__).parent

_NAMES_GROW = (
    "Intervals are three numbers: an estimate, and its name with _low and _high. A bound that is "
    "null is no bound. Names are only added within one version of the schema."
)

DOCUMENTS: dict[str, tuple[Any, str, str]] = {
    "audit": (AuditDocument, "audit.json of qaudit", _NAMES_GROW),
    "plan": (PlanDocument, "the plan of qaudit scan --dry-run --json", _NAMES_GROW),
    "gate": (GateAnswer | GateFailure, "qaudit gate --format json", _NAMES_GROW),
}


def text_of_schema(name: str) -> str:
    described = codec.schema_of(*DOCUMENTS[name])
    for table in (described, *described["$defs"].values()):
        table.get("properties", {}).pop("passes", None)
    if name == "audit":
        del described["properties"]["protocol"]
    return json.dumps(described, indent=1) + "\n"


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.schema.json"


def checkpoints_of(subjects: Iterable[Subject]) -> tuple[Checkpoint, ...]:
    return tuple(dict.fromkeys(c for subject in subjects for c, _ in subject.members))


Places = Mapping[Checkpoint, int]
"""Where in the list of checkpoints of a plan each is."""


def _pointers(subject: Subject, places: Places) -> dict[str, Any]:
    """Return the fields of a subject whose members point into a list of checkpoints."""
    members = tuple(MemberDocument(c.label, weight, places[c]) for c, weight in subject.members)
    return {"label": subject.label, "merge": subject.merge, "members": members}


def _plan_fields(plan: Plan, places: Places) -> dict[str, Any]:
    subjects = tuple(SubjectDocument(**_pointers(subject, places)) for subject in plan.subjects)
    return {**vars(plan), "passes": (), "subjects": subjects, "checkpoints": tuple(places)}


def plan_to_json(plan: Plan) -> str:
    places = {c: place for place, c in enumerate(checkpoints_of(plan.subjects))}
    table = codec.encode(PlanDocument(**_plan_fields(plan, places)))
    del table["passes"]
    return codec.text_of(table)


def subjects_in(
    documents: Sequence[SubjectDocument], checkpoints: Sequence[Checkpoint], where: str
) -> tuple[Subject, ...]:
    """Return subjects with the checkpoints that their members point to."""
    subjects = []
    for number, document in enumerate(documents):
        place = f"{where}[{number}].members"
        if not document.members:
            raise AuditError(f"`{place}` is empty", hint=codec.EDITED)
        for k, member in enumerate(document.members):
            if not 0 <= member.checkpoint < len(checkpoints):
                wrong = f"`{place}[{k}].checkpoint` points to no checkpoint"
                raise AuditError(wrong, hint=codec.EDITED)
        members = tuple((checkpoints[m.checkpoint], m.weight) for m in document.members)
        subjects.append(Subject(document.label, members, document.merge))
    return tuple(subjects)


def to_json(audit: AuditRecord) -> str:
    checkpoints = checkpoints_of((*audit.plan.subjects, *audit.subjects))
    places = {checkpoint: place for place, checkpoint in enumerate(checkpoints)}
    plan = MeasuredPlanDocument(**_plan_fields(audit.plan, places), protocol=audit.protocol)
    subjects = []
    for subject in audit.subjects:
        first = subject.first
        about: dict[str, Any] = {
            "revision": first.ref.revision,
            "commit": first.commit,
            "stage": first.stage,
            "step": first.step,
            "tokens_seen": first.tokens,
            "learning_rate": first.learning_rate,
        }
        if subject.kind == "soup":
            about = dict.fromkeys(about)
        about |= {"kind": subject.kind, "content": subject.content, "configuration": first.label}
        subjects.append(SubjectSummary(**_pointers(subject, places), **about))
    changed = {"plan": plan, "subjects": tuple(subjects)}
    document = codec.encode(AuditDocument(**vars(audit) | changed))
    del document["plan"]["passes"], document["protocol"]
    document["diagnostics"] = {k: rows for k, rows in document["diagnostics"].items() if rows}
    return codec.text_of(document)


def read_audit(path: Path) -> AuditRecord:
    """Read the audit in an output folder, or the one in a file."""
    file = path / codec.FILE if path.is_dir() else path
    if not file.exists():
        refuse_unfinished(file.parent)
        raise AuditError(
            f"there is no audit at `{path}`", hint="name an output folder of `qaudit scan`"
        )
    try:
        text = read_regular(file, codec.LARGEST_NBYTES).decode()
    except (OSError, ValueError) as error:
        raise AuditError(f"`{file}` cannot be read: {error}", hint=codec.EDITED) from error
    if file.suffix != ".json":
        hint = "name an output folder of `qaudit scan`, or the `audit.json` in one"
        raise AuditError(f"`{file}` is not an audit", hint=hint)
    return from_json(text)


def from_json(text: str) -> AuditRecord:
    """Read an audit of this version; refuse a truncated, foreign or future one."""
    try:
        document = codec.parse(text)
    except ValueError as error:
        raise AuditError(
            f"the audit is not whole JSON: {error}",
            hint="it may be truncated: run the same scan again to have it written anew",
        ) from error
    if not isinstance(document, dict) or not {"schema", "qaudit", "plan"} <= document.keys():
        raise AuditError(
            "this is not an audit of qaudit", hint="name the `audit.json` of an output folder"
        )
    codec.refuse_other_schema(document, "the audit", codec.EDITED)
    read = codec.decode(AuditDocument, document, "audit")
    checkpoints = read.plan.checkpoints
    if not 0 < read.plan.recipe.confidence < 1:
        raise AuditError("`audit.plan.recipe.confidence` is not between 0 and 1", hint=codec.EDITED)
    plan = {field.name: getattr(read.plan, field.name) for field in fields(Plan)}
    plan["subjects"] = subjects_in(read.plan.subjects, checkpoints, "audit.plan.subjects")
    changed = {"plan": Plan(**plan), "protocol": read.plan.protocol}
    changed["subjects"] = subjects_in(read.subjects, checkpoints, "audit.subjects")
    audit = AuditRecord(**vars(read) | changed)
    labels = {subject.label for subject in audit.subjects}
    measured = {row.cell for row in audit.measurements}
    for subject, _ in measured:
        if subject not in labels:
            raise AuditError(
                f"the audit measures `{subject}`, which is none of its subjects", hint=codec.EDITED
            )
    if audit.pick is not None and (audit.pick.subject, audit.pick.scheme) not in measured:
        raise AuditError(
            f"the audit picks `{audit.pick.subject}` under `{audit.pick.scheme}`, "
            "which it did not measure",
            hint=codec.EDITED,
        )
    return audit


if __name__ == "__main__":
    for name in DOCUMENTS:
        path_of(name).write_text(text_of_schema(name), encoding="utf-8")
