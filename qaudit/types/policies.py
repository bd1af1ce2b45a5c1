"""What a release must hold to, and whether it does: policies, their checks, and the gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from qaudit.types.conclusions import Finding
from qaudit.types.metrics import METRICS, Metric, MetricRecord, Unit
from qaudit.types.rows import Interval, Row

Level = Literal["off", "warn", "error"]
SELECTORS = ("@ships", "@pick", "@last", "@soups", "@checkpoints", "@all")
"""Subjects by what they are, instead of a name or a glob."""


@dataclass(frozen=True)
class PolicyRule:
    """One rule of a policy: a metric of some subjects and schemes, and its margin."""

    name: str
    metric: Metric
    margin: float
    level: Level = "error"
    schemes: tuple[str, ...] = ("*",)  # globs over short forms
    subjects: tuple[str, ...] = ("@pick",)  # globs over labels, or SELECTORS
    bits: tuple[str, ...] = ()  # only schemes of these classes; empty: of all
    strata: Literal["worst"] | None = None  # None: all documents together
    tasks: Literal["worst"] | None = None  # None: the mean over tasks
    line: int = 1  # of the policy file


@dataclass(frozen=True)
class Ignore:
    """An exception that a policy makes, with its reason, up to and including a day."""

    rule: str  # its name or its code
    reason: str
    until: date
    subject: str = "*"
    scheme: str = "*"
    line: int = 1


@dataclass(frozen=True)
class Tolerances:
    """By how many nats per token a file may run otherwise than it was audited."""

    plain: float = 1e-6  # where the runtime multiplies with torch's own products
    loss: float = 2e-3  # with kernels, or rounding, of its own
    kl: float = 2e-3
    narrow: float = 5e-3  # loss and KL, where it computes in bfloat16 what was measured in float32
    activations: float = 2e-2  # loss and KL, where the runtime rounds activations (llama.cpp)


@dataclass(frozen=True)
class Policy:
    """Rules, and how much must be known before they are judged."""

    name: str  # of the preset, or as the file calls itself
    rules: tuple[PolicyRule, ...]
    ignores: tuple[Ignore, ...] = ()
    minimum_documents: int = 10
    required_schemes: tuple[str, ...] = ()  # every gated subject must have been measured under it
    required_subjects: tuple[str, ...] = ()
    required_answers: Literal["off", "warn"] = "off"  # where KL divergence ranks nothing
    confidence: float = 0.95
    known: Literal["warn", "error"] = "error"  # what a breach is worth that the baseline has, too
    classes: Mapping[str, Level] = field(default_factory=dict)  # bit classes that may ship
    verify: Tolerances = Tolerances()
    path: str | None = None  # of the file; None for a preset
    line_of_documents: int = 1  # of `minimum_documents`
    line_of_required: int = 1
    line_of_classes: int = 1


@dataclass(frozen=True, kw_only=True)
class Check(Finding):
    """One rule held against one subject and scheme: a finding, with what the policy asked for."""

    name: str  # the policy's own name for it
    level: Level  # type: ignore[assignment]
    metric: Metric | Literal["coverage", "documents"]
    outcome: Literal["pass", "fail", "inconclusive", "missing"]  # type: ignore[assignment]
    hint: str = ""
    unit: Unit = "fraction"
    documents: int = 0  # or items, of accuracy
    against: str | None = None  # the subject of the baseline, or the best member of the soup
    bit_class: str | None = None  # of the scheme
    ignored: Ignore | None = None
    needed_documents: int | None = None  # that decide an inconclusive check; None: more would not
    known: bool = False  # the baseline breaches it, too, and this is not shown to be worse
    line: int = 1  # of the policy file

    @property
    def record(self) -> MetricRecord | None:
        """What the metric is; None for checks of coverage and of documents."""
        return METRICS.get(self.metric)

    @property
    def counts(self) -> bool:
        return self.level == "error" and self.ignored is None


CheckStanding = Literal["fail", "missing", "inconclusive", "warning", "ignored", "pass"]
"""The outcome of a check, if it counts."""


@dataclass(frozen=True)
class NextStep(Row):
    """What decides the classes that are undecided, as one command."""

    bits: tuple[str, ...]
    command: str
    documents: int
    available: int | None = None  # documents that the text at hand has; None: it was not counted


@dataclass(frozen=True)
class Gate:
    """A policy held against an audit."""

    policy: Policy
    checks: tuple[Check, ...]
    warnings: tuple[Finding, ...] = ()  # of the policy: ignores that expired or match nothing
    targets: tuple[str, ...] = ()
    baseline: str | None = None
    at_once: int = 1  # intervals of rules that count: all of them hold with the confidence
    classes: tuple[ClassVerdict, ...] = ()  # what ships of each bit class
    next_step: NextStep | None = None

    def of(self, outcome: str) -> tuple[Check, ...]:
        return tuple(c for c in self.checks if c.counts and c.outcome == outcome)

    @property
    def verdict(self) -> Literal["pass", "fail", "inconclusive", "incomplete"]:
        if self.of("fail"):
            return "fail"
        if self.of("missing"):
            return "incomplete"
        return "inconclusive" if self.of("inconclusive") else "pass"

    @property
    def exit_code(self) -> Literal[0, 1, 3]:
        codes: dict[str, Literal[0, 1, 3]] = {"pass": 0, "fail": 1}
        return codes.get(self.verdict, 3)


Status = Literal["ship", "hold", "undecided", "incomplete", "unjudged"]
"""`hold`: a rule is breached. `undecided`: a rule is missing or inconclusive. `incomplete`: a
measurement that is asked for is missing. `unjudged`: the policy does not ask for this class."""


@dataclass(frozen=True)
class ClassVerdict(Row):
    """The subject and scheme that ships of one bit class, and whether it may."""

    bit_class: str  # "4": four bits per weight
    level: Literal["error", "warn", "off"]  # what the policy makes of this class
    status: Status
    subject: str | None  # None: nothing of this class was measured
    scheme: str | None
    objective: str
    ce: Interval | None = None  # nats per token
    relative_error: Interval | None = None  # a fraction; where the rule bounds it, as it was judged
    kl: Interval | None = None  # nats per token
    rule: str | None = None  # of the policy, the one that decides
    margin: float | None = None  # of that rule, in its unit
    unit: Unit | None = None  # of the margin
    metric: str | None = None  # that the margin bounds; None: judged before it was recorded
    runner_up: str | None = None
    runner_up_scheme: str | None = None
    lead: Interval | None = None  # loss minus the runner-up's
    reference: str | None = None  # in full precision; then `lead` is the excess over its loss
    contenders: tuple[str, ...] = ()  # `subject at scheme` that may be as good
    changes: tuple[str, ...] = ()  # what would make it another
    breaches: tuple[str, ...] = ()  # which rules are breached, and by how much
    warnings: tuple[str, ...] = ()  # of rules that do not decide
    needs: tuple[str, ...] = ()  # what would decide: documents, a missing measurement
    needed_documents: int | None = None  # that decide, in four of five cases; None: more do not
    documents: int | None = None  # that judge it
    at_once: int = 1  # it and its contenders: upper ends of its intervals pay for choosing
    bits_per_weight: float | None = None
    nbytes: int | None = None  # of all weights as they are stored

    def __post_init__(self) -> None:
        """Refuse a subject under no scheme: no card can name it."""
        if self.subject is not None and self.scheme is None:
            raise ValueError("has a `subject` without a `scheme`")


@dataclass(frozen=True)
class Verdict:
    """One line for each bit class, under a policy: the answer of `qaudit gate`."""

    policy: str
    objective: str
    confidence: float
    classes: tuple[ClassVerdict, ...]
    status: Status  # the worst of the classes whose level is `error`, and of `others`
    others: tuple[str, ...] = ()  # errors of the policy that are about no class
    next_step: NextStep | None = None  # None: nothing is undecided, or more documents do not decide
