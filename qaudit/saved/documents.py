"""What is written as JSON where it differs from the types: subjects that point to checkpoints.

The published schemas are made from these dataclasses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from qaudit.saved.codec import schema_of
from qaudit.types import (
    Check,
    Checkpoint,
    CheckStanding,
    ClassVerdict,
    Comparison,
    Diagnostics,
    Finding,
    GreedySearch,
    MeasurementRow,
    NextStep,
    Pass,
    Pick,
    Pins,
    Plan,
    Recipe,
    Resolved,
    Signature,
    Skipped,
    TaskRow,
    Verdict,
)


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
class AuditDocument:
    """An audit; `measurements` are unique by subject, spec and calibration_seed."""

    schema: Literal["1"]
    qaudit: str
    plan: MeasuredPlanDocument
    environment: dict[str, Any]
    subjects: tuple[SubjectSummary, ...]
    measurements: tuple[MeasurementRow, ...]
    comparisons: tuple[Comparison, ...]
    diagnostics: Diagnostics
    findings: tuple[Finding, ...]
    pick: Pick | None
    verdict: Verdict | None = None
    skipped: tuple[Skipped, ...]
    tasks: tuple[TaskRow, ...]
    signature: Signature | None = None


@dataclass(frozen=True, kw_only=True)
class RoundDocument:
    """`parts/round-2.json`: passes that became due when those before were judged."""

    round: int
    passes: tuple[Pass, ...]


@dataclass(frozen=True, kw_only=True)
class RunDocument:
    """`plan.json`: what a recipe means, the work, and what every process must agree on."""

    run: Literal["qaudit run"] = "qaudit run"
    schema: Literal["1"] = "1"
    qaudit: str
    requested: Recipe  # as it was written
    resolved: Resolved
    plan: Plan
    pins: Pins | None  # None until the text is read
    digest: str = ""  # of everything else


@dataclass(frozen=True, kw_only=True)
class TaskFile:
    """The evidence of a measurement on one task."""

    task: str
    evidence: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ResultDocument:
    """A measurement in the evidence folder, with the hash of its file."""

    scheme: str
    spec: str
    perturbed: bool
    evidence: str
    sha256: str
    tasks: tuple[TaskFile, ...] = ()


@dataclass(frozen=True)
class DiagnosticRows:
    """What the diagnostics of one subject gave, by name, and why others are missing."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why there is no answer."""

    message: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class UnitDocument:
    """`parts/units/*.json`: what came of one subject in one round."""

    schema: Literal["1"] = "1"
    run: str  # the identity of the run
    unit: str  # the content of the unit
    label: str
    part: str  # `K-of-N` of the process that measured it
    host: str
    results: tuple[ResultDocument, ...] = ()
    search: GreedySearch | None = None
    findings: tuple[Finding, ...] = ()
    error: Failure | None = None
    exit_code: Literal[2, 4] = 4  # of the error, where nothing else was measured
    failed_schemes: dict[str, Failure] = field(default_factory=dict)
    failed_tasks: dict[str, str] = field(default_factory=dict)  # and why
    diagnostics: DiagnosticRows = field(default_factory=DiagnosticRows)
    protocol: dict[str, Any]
    environment: dict[str, Any]


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
    described = schema_of(*DOCUMENTS[name])
    for table in (described, *described["$defs"].values()):
        table.get("properties", {}).pop("passes", None)
    return json.dumps(described, indent=1) + "\n"


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.schema.json"


if __name__ == "__main__":
    for name in DOCUMENTS:
        path_of(name).write_text(text_of_schema(name), encoding="utf-8")
