"""A run along its course: where quantities change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qaudit.types.rows import Interval, Row


@dataclass(frozen=True)
class StratumRow(Row):
    """Loss and errors on the documents of one stratum.

    The intervals of one subject under one scheme hold at once. None is not measured.
    """

    subject: str
    scheme: str
    spec: str
    stratum: str
    documents: int
    tokens: int
    ce: Interval  # nats per token
    relative_error: Interval | None
    absolute_change: Interval | None  # nats per token
    kl: Interval | None = None  # divergence to full precision, nats per token
    is_worst: bool = False  # of all strata, by relative error


@dataclass(frozen=True)
class PositionRow(Row):
    """Loss and errors of tokens by where in their window they are.

    The intervals of one subject under one scheme hold at once. None is not measured. Of rollouts,
    positions count from the prompt's end, prompts take the place of documents, and ends are as in
    `RolloutRow`.
    """

    subject: str
    scheme: str
    spec: str
    first: int  # position in the window, from 0
    last: int
    documents: int  # that reach so far
    tokens: int
    ce: Interval  # nats per token
    relative_error: Interval | None
    absolute_change: Interval | None  # nats per token
    kl: Interval | None = None  # divergence to full precision, nats per token
    end_of_turn: Interval | None = None
    end_of_reasoning: Interval | None = None


@dataclass(frozen=True)
class RoleRow(Row):
    """Loss and errors of tokens by their role in a conversation.

    The intervals of one subject under one scheme hold at once. None is not measured. Of rollouts,
    prompts take the place of documents, and ends are as in `RolloutRow`.
    """

    subject: str
    scheme: str
    spec: str
    role: str  # prompt, reasoning, call or answer
    documents: int  # that have such tokens
    tokens: int
    ce: Interval  # nats per token
    relative_error: Interval | None
    absolute_change: Interval | None  # nats per token
    kl: Interval | None = None  # divergence to full precision, nats per token
    end_of_turn: Interval | None = None
    end_of_reasoning: Interval | None = None


@dataclass(frozen=True)
class RolloutRow(Row):
    """What a stream makes of rollouts, on the first draw; intervals are over prompts.

    None is not measured: divergence needs greedy rollouts, ends the tokens that end something.
    """

    subject: str
    scheme: str
    spec: str
    prompts: int
    samples: int
    tokens: int
    ce: Interval  # nats per token that was written
    kl: Interval | None  # divergence to full precision, nats per token
    sequence_kl: Interval | None  # the same of a whole sample
    tokens_to_divergence: Interval | None  # median; None also where most never diverge
    never_diverges: Interval | None  # a share of prompts
    end_of_turn: Interval | None  # its probability, relative to full precision, less 1
    end_of_reasoning: Interval | None
    expected_score: Interval | None = None  # of answers, by marks and importance weights
    expected_change: Interval | None = None  # the same less full precision's, on the same answers
    effective_samples: float | None = None
    unweighed: str = ""  # why marks give no expected score


@dataclass(frozen=True)
class RoutingRow(Row):
    """How far one layer's router chooses other experts than in full precision.

    The intervals of one subject under one scheme hold at once.
    """

    subject: str
    scheme: str
    spec: str
    block: int
    documents: int
    tokens: int
    agreement: Interval  # a fraction of tokens whose set of experts is the same
    moved: Interval  # half the L1 distance of normalized routing weights, mean over tokens


Where = Literal["before", "around", "after"]
"""The place of a change point against a span; `around`: its interval overlaps the span."""


@dataclass(frozen=True)
class Span:
    """A stretch between two checkpoints of a course, or one of them."""

    low: float
    high: float
    low_label: str
    high_label: str


@dataclass(frozen=True)
class ChangeRow:
    """Where a quantity along the course changes: a scheme's relative error, or the loss (`fp`).

    `change`: one break fits better than a straight line and than smooth curves; `bend`: a
    straight line does not fit, a smooth curve may; `none`: neither was detected.
    """

    scheme: str
    verdict: Literal["change", "bend", "none", "unknown"]
    reason: str = ""
    points: int = 0
    kind: Literal["turn", "jump", "either"] | None = None
    at: Interval | None = None
    effect: Interval | None = None  # of a turn: of the slope, per unit; of a jump: its height
    against_line: float | None = None  # probabilities of such a course without a break
    against_curve: float | None = None
    decay: Where | None = None  # against the start of the learning rate's decay
    loss_end: Where | None = None  # against where full precision stops improving

    def __post_init__(self) -> None:
        """Refuse a change without a place: no card can show it."""
        if self.verdict == "change" and self.at is None:
            raise ValueError("has a change without `at`")


@dataclass(frozen=True)
class Course:
    """One run of a series in training order, of parallel ingredients the longest."""

    run: str
    unit: Literal["tokens", "steps", "checkpoints in order"]
    checkpoints: tuple[str, ...]
    positions: tuple[float, ...]
    confidence: float
    decay: Span | None = None  # where the learning rate starts to fall
    decay_reason: str = ""
    loss_end: Span | None = None  # where full-precision loss stops improving
    loss_end_reason: str = ""
    changes: tuple[ChangeRow, ...] = ()
