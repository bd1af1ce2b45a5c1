"""What is concluded: rows of the audit's tables, the pick, and what to measure next."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from qaudit.types.rows import Interval, Row

_CODE = re.compile(r"[A-Z]{2}[0-9]{3}")


@dataclass(frozen=True)
class MeasurementRow(Row):
    """A measurement with its intervals; a row of `measurements` in audit.json."""

    nulls: ClassVar[Mapping[str, float]] = {"perplexity": math.inf}

    subject: str
    scheme: str
    spec: str
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
class TaskRow(Row):
    """Accuracy on a task, and what changed against full precision on the same items.

    `drop` is in points of accuracy; `accuracy_drop` is divided by what full precision gets wrong,
    as in paper A. The task `mean` is the unweighted mean over tasks.
    """

    subject: str
    scheme: str
    spec: str
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
