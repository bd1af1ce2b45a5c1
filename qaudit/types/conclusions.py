"""What is concluded: rows of the audit's tables, the pick, what to measure next, and the gate.

A policy is what a release must hold to; its checks and the gate say whether it does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import ClassVar, Literal

from qaudit.types.metrics import METRICS, Metric, MetricRecord, Unit
from qaudit.types.rows import CellRow, Interval, Row

_CODE = re.compile(r"[A-Z]{2}[0-9]{3}")


@dataclass(frozen=True)
class MeasurementRow(CellRow):
    """A measurement with its intervals; a row of `measurements` in audit.json."""

    nulls: ClassVar[Mapping[str, float]] = {"perplexity": math.inf}

    calibration_seed: int
    ce: Interval
    relative_error: Interval | None
    absolute_change: Interval | None
    perplexity: float
    bits_per_byte: float | None
    documents: int
    tokens: int
    bits_per_weight: float
    seconds: float
    notes: tuple[str, ...]
    evidence: str
    evidence_sha256: str
    kl: Interval | None = None  # KL divergence to full precision, nats per token
    top1_agreement: Interval | None = None  # a fraction of tokens
    rms_dp: Interval | None = None  # change of the right token's probability, root mean square
    kl_p50: Interval | None = None  # quantiles of one draw: intervals over documents alone
    kl_p90: Interval | None = None
    kl_p99: Interval | None = None
    kl_p999: Interval | None = None
    kl_max: float | None = None
    bits_per_parameter: float | None = None  # embeddings and head included
    nbytes: int | None = None  # of all weights as they are stored
    worst_share: float | None = None  # of the loss that was added, carried by one document
    documents_for_loss: int | None = None  # for an interval of +-10 % around the loss that is added
    documents_for_kl: int | None = None  # the same for KL divergence
    bit_class: str = "fp"  # what it competes in: `4`, `w4a4`, `fp`
    calibrates: bool = False  # whether it depends on the draw of calibration text
    mixture: dict[str, str] = field(default_factory=dict)  # bits of each linear, a digit a block
    output_error: Interval | None = None  # squared error of the last block's output, relative
    routing_agreement: Interval | None = None  # of tokens and layers whose experts are the same
    routing_moved: Interval | None = None  # mass of routing weights on other experts, mean
    reference_kl: Interval | None = None  # KL divergence to the subject that is the reference
    reference_top1_agreement: Interval | None = None
    sure_flips: Interval | None = None  # of tokens whose likeliest had 0.5 at least: now another
    # By the probability of full precision's likeliest token: up to 0.25, 0.5, 0.9 and above.
    confidence_shares: tuple[float, ...] = ()  # of tokens
    confidence_kl: tuple[float | None, ...] = ()  # nats per token


@dataclass(frozen=True)
class TaskRow(CellRow):
    """Accuracy on a task, and what changed against full precision on the same items.

    `drop` is in points of accuracy; `accuracy_drop` is divided by what full precision gets wrong,
    as in paper A. The task `mean` is the unweighted mean over tasks.
    """

    task: str
    accuracy: Interval
    accuracy_drop: Interval | None
    items: int
    drop: Interval | None = None
    flips: float | None = None  # a fraction of items that went from right to wrong or back
    right_to_wrong: int | None = None
    wrong_to_right: int | None = None
    changed_answers: int | None = None  # items with another answer, be both wrong
    p_value: float | None = None  # of McNemar's test, mid-p
    margin_factor: Interval | None = None  # median over items; None: too few
    reference_drop: Interval | None = None  # in points, against the subject that is the reference
    reference_flips: float | None = None
    evidence: str = ""
    evidence_sha256: str = ""
    imported: str = ""  # the tool, metric and decoding of answers that were not given here


@dataclass(frozen=True)
class Comparison(Row):
    """Two subjects under one scheme, paired on the same documents; negative favours `a`."""

    kind: Literal["outright", "difference_of_differences", "relative_error_difference"]
    unit: str
    scheme: str
    a: str
    b: str
    interval: Interval
    verdict: Literal["a_better", "b_better", "equivalent", "inconclusive"]
    documents: int


@dataclass(frozen=True)
class Finding(Row):
    """One rule applied to one measurement."""

    rule: str
    level: Literal["info", "warn", "error"]
    subject: str
    scheme: str | None
    message: str
    hint: str
    interval: Interval | None = None
    margin: float | None = None
    outcome: Literal["pass", "fail", "inconclusive"] = "fail"

    def __post_init__(self) -> None:
        """Refuse a rule that is no code: lists of findings print it unescaped."""
        if not _CODE.fullmatch(self.rule):
            raise ValueError("has a `rule` that is no code")


@dataclass(frozen=True)
class Pick(Row):
    """The one thing to ship under an objective, and how sure that is."""

    subject: str
    scheme: str
    objective: str
    runner_up: str | None
    interval: Interval | None  # against the runner-up, or against `reference`
    runner_up_scheme: str | None = None
    reference: str | None = None  # the full-precision subject that the margin is counted from
    contenders: tuple[str, ...] = ()  # that may be as good, with all compared at once
    changes: tuple[str, ...] = ()  # what would make it another


Method = Literal["signals", "neighbours", "mean"]


@dataclass(frozen=True)
class Worth:
    """What each way of predicting errs by at checkpoints that were left out, and the one used."""

    method: Method
    signals: float
    neighbours: float
    mean: float


@dataclass(frozen=True)
class Prospect:
    """An unmeasured checkpoint, and what is predicted of it."""

    label: str
    position: float
    error: Interval  # relative error, a fraction
    loss: Interval  # quantized, nats per token
    better: float  # probability of a lower quantized loss than the best measured
    gain: float  # by how much it is expected to be lower, nats per token
    beyond: bool  # of all that is measured


@dataclass(frozen=True)
class Suggestion:
    """What to measure next under a scheme, most promising first; or why nothing is suggested."""

    scheme: str
    reason: str = ""
    unit: str = ""
    measured: int = 0
    signals: tuple[str, ...] = ()
    best: str = ""
    best_loss: float | None = None
    error: Worth | None = None
    loss: Worth | None = None
    prospects: tuple[Prospect, ...] = ()


Reading = Literal["worse", "better", "unclear", "same"]
"""Of b against a. `same` is equal to the bit; `unclear` is not known to be equal."""


@dataclass(frozen=True)
class Changed:
    """One thing that is not the same in both, as text; None is not there."""

    what: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class Delta(Row):
    """One subject under one scheme, b minus a: positive is worse."""

    subject: str
    scheme: str
    loss: Interval | None  # in the unit of the difference; None where that means nothing
    loss_reading: Reading | None
    relative_error: Interval | None  # a fraction; None for full precision
    relative_error_reading: Reading | None
    documents: int
    kl: Interval | None = None  # divergence to full precision, nats per token
    kl_reading: Reading | None = None


@dataclass(frozen=True)
class TaskDelta(Row):
    """Accuracy on a task, a minus b in points: positive is worse."""

    subject: str
    scheme: str
    task: str
    drop: Interval
    reading: Reading
    paired: bool  # whether both answered the same items
    items: int


@dataclass(frozen=True)
class Difference:
    """Two audits held against each other; all intervals hold at once."""

    a: str
    b: str
    paired: bool
    shared_documents: int
    documents: tuple[int, int]  # of a, and of b
    unit: Literal["nats per token", "bits per byte"]
    confidence: float
    at_once: int
    deltas: tuple[Delta, ...]
    notes: tuple[str, ...]  # why not paired, why in bits per byte
    protocol: tuple[Changed, ...]
    software: tuple[Changed, ...]
    weights: tuple[str, ...]  # subjects of the same label and other weights
    specs: tuple[Changed, ...]  # schemes of the same name and another meaning
    subjects: tuple[Changed, ...]  # in one of them only
    schemes: tuple[Changed, ...]  # in one of them only
    picks: tuple[Pick | None, Pick | None]
    tasks: tuple[TaskDelta, ...] = ()

    @property
    def pick_changed(self) -> bool:
        a, b = (pick and (pick.subject, pick.scheme) for pick in self.picks)
        return a != b


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
