"""The nouns. Frozen values without torch, in the order in which the sentence uses them.

text -> Recipe -> Plan -> (engine) -> Measurement -> Audit -> card
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FULL_PRECISION = "fp"
"""The display name and spec of the stream that is never quantized."""

GREEDY = "greedy"
"""Stands where a merge does, and is a search among candidates: `greedy:scheme=gptq-4bit`."""

RELEASED = "released"
"""Stands where a merge does: the first member is said to be a merge of the others: `released:mean`.
It is compared with that merge, and nothing is measured."""

# ---------------------------------------------- what is audited


@dataclass(frozen=True)
class Ref:
    """Where a checkpoint lies: a Hub repo or a local folder, a revision, a sub-folder."""

    location: str
    revision: str | None = None
    subfolder: str | None = None

    @classmethod
    def parse(cls, text: str) -> Ref:
        """Read `location[@revision][//subfolder]`."""
        head, _, subfolder = text.partition("//")
        location, _, revision = head.partition("@")
        return cls(location, revision or None, subfolder or None)

    def __str__(self) -> str:
        """Print what `parse` reads."""
        revision = f"@{self.revision}" if self.revision else ""
        subfolder = f"//{self.subfolder}" if self.subfolder else ""
        return f"{self.location}{revision}{subfolder}"


@dataclass(frozen=True)
class WeightFile:
    """One file of weights and the hash of its bytes.

    A Hub file that is kept without LFS is known by its git id alone: `sha256` is then `git:...`.
    """

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """One point of one training run. Never a weight."""

    ref: Ref
    label: str
    files: tuple[WeightFile, ...] = ()
    commit: str | None = None
    family: str | None = None
    stage: str | None = None
    ingredient: int | None = None
    step: int | None = None
    tokens: int | None = None
    learning_rate: float | None = None
    notes: tuple[str, ...] = ()
    suspect: tuple[str, ...] = ()  # why these weights may not be what the name says
    requires: tuple[str, ...] = ()  # `pickle` or `remote_code`: never given unless asked for

    @property
    def nbytes(self) -> int:
        """Bytes of weights on disk."""
        return sum(file.nbytes for file in self.files)

    @property
    def content(self) -> str:
        """Identify the weights by what they are, not by where they lie or what they are called."""
        return digest(sorted((f.name, f.sha256) for f in self.files))


@dataclass(frozen=True)
class Subject:
    """What is measured: a checkpoint is a soup of one, and there is no second code path."""

    label: str
    members: tuple[tuple[Checkpoint, float], ...]
    merge: str | None = None

    @property
    def kind(self) -> Literal["checkpoint", "soup"]:
        """Say whether weights are merged."""
        return "checkpoint" if self.merge is None else "soup"

    @property
    def is_search(self) -> bool:
        """Say whether members are candidates, of which measuring decides who goes in."""
        return self.merge is not None and self.merge.partition(":")[0] == GREEDY

    @property
    def is_release(self) -> bool:
        """Say whether the first member is compared with a merge of the others."""
        return self.merge is not None and self.merge.partition(":")[0] == RELEASED

    @property
    def first(self) -> Checkpoint:
        """The member whose config and tokenizer stand for all."""
        return self.members[0][0]

    @property
    def content(self) -> str:
        """Identify the merged weights; for a checkpoint, its own."""
        if self.merge is None:
            return self.first.content
        return digest([self.merge, [(c.content, weight) for c, weight in self.members]])


# ---------------------------------------------- what it is measured on


@dataclass(frozen=True)
class Document:
    """A named text, the unit of analysis."""

    name: str
    text: str

    @cached_property
    def sha256(self) -> str:
        """Identify the text by its bytes."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Choice:
    """A multiple-choice item: the log-likelihood of each option after the context decides."""

    name: str
    context: str
    options: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Protocol:
    """How text becomes windows of tokens, and how many."""

    context: int
    stride: int
    bos: Literal["auto", "always", "never"] = "auto"
    packed: bool = False
    evaluation_documents: int = 64
    calibration_documents: int = 64
    document_tokens: int | None = None
    calibration_seed: int = 0


@dataclass(frozen=True, eq=False)
class Window:
    """A run of tokens that goes through the model at once.

    Tokens before `scored_from` are context: they are read, and their loss is not counted.
    """

    document: int
    tokens: npt.NDArray[np.int32]
    scored_from: int = 1

    @property
    def scored(self) -> int:
        """Number of tokens whose loss is counted."""
        return len(self.tokens) - self.scored_from


SELECTION, HELD_OUT = "selection", "held-out"
"""Documents to choose on, and documents to report on: who wins on the first is lucky there."""


@dataclass(frozen=True)
class EvaluationDocument:
    """What is known of an evaluation document once it is cut: its name, hash and scored bytes."""

    name: str
    sha256: str
    nbytes: int
    split: str = SELECTION


@dataclass(frozen=True, eq=False)
class Corpus:
    """Calibration and evaluation text as tokens, with its hashes and the protocol that cut it.

    Windows of choices stand after those of documents; their `document` counts (item, option)
    pairs in order, from zero, and `choices` says how many options each item has.
    """

    protocol: Protocol
    calibration: tuple[Window, ...]
    evaluation: tuple[Window, ...]
    documents: tuple[EvaluationDocument, ...]
    choices: tuple[Choice, ...] = ()
    choice_windows: tuple[Window, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    further: tuple[tuple[Window, ...], ...] = ()  # calibration of the seeds that follow

    @property
    def draws(self) -> tuple[Corpus, ...]:
        """The same evaluation text with every draw of calibration text, this one first."""
        seed = self.protocol.calibration_seed
        return tuple(
            replace(
                self,
                protocol=replace(self.protocol, calibration_seed=seed + k),
                calibration=windows,
                further=(),
            )
            for k, windows in enumerate((self.calibration, *self.further))
        )

    @cached_property
    def sha256(self) -> str:
        """Identify every token that is fed, every one that is scored, and what for."""
        windows = (self.calibration, self.evaluation, self.choice_windows)
        cut = [[(w.document, w.tokens.tolist(), w.scored_from) for w in part] for part in windows]
        return digest([cut, [document.split for document in self.documents]])


@dataclass(frozen=True)
class TextFile:
    """A text that is a file in a Hub dataset, pinned to a commit and to the hash of its bytes."""

    source: str  # as it was asked for: hf://datasets/org/name[@revision]/path[::field]
    repo: str
    commit: str
    path: str
    nbytes: int
    sha256: str  # or `git:...`, as for weights


# ---------------------------------------------- what was asked, what it costs


@dataclass(frozen=True)
class Recipe:
    """What a person asked for: nothing resolved, nothing priced."""

    targets: tuple[str, ...]
    schemes: tuple[str, ...]
    checkpoints: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    every: int | None = None
    last: int | None = None
    limit: int | None = None
    soups: tuple[str, ...] = ()
    calibration: str | None = None
    evaluation: str | None = None
    choices: str | None = None
    context: int | None = None
    stride: int | None = None
    bos: Literal["auto", "always", "never"] = "auto"
    packed: bool = False
    evaluation_documents: int = 64
    calibration_documents: int = 64
    document_tokens: int | None = None
    calibration_seed: int = 0
    repeats: int = 1
    device: str = "auto"
    dtype: str = "auto"
    confidence: float = 0.95
    schedule: dict[str, Any] | None = None
    family: str | None = None


@dataclass(frozen=True)
class Traffic:
    """What a plan takes from the Hub, and what it leaves on the disk at its worst moment."""

    nbytes_to_fetch: int
    nbytes_cached: int
    nbytes_disk_peak: int
    nbytes_disk_free: int
    nbytes_disk_budget: int | None = None


@dataclass(frozen=True)
class Plan:
    """The recipe resolved and priced, before the first byte of weights is read."""

    recipe: Recipe
    subjects: tuple[Subject, ...]
    specs: tuple[str, ...]
    device: str
    dtype: str
    context: int
    parameters: int
    blocks: int
    nbytes_read: int
    nbytes_memory: int
    nbytes_memory_fixed: int
    nbytes_memory_available: int
    passes: int
    seconds_low: float
    seconds_high: float
    notes: tuple[str, ...] = ()
    texts: tuple[TextFile, ...] = ()
    traffic: Traffic | None = None  # None: every target is a local folder
    findings: tuple[Finding, ...] = ()  # what is wrong by names and hashes alone
    releases: tuple[Subject, ...] = ()  # what is compared with the soup that it is said to be
    detectable_relative_error: float | None = None  # with 80 % power, by what is measured already


# ---------------------------------------------- what was measured


@dataclass(frozen=True, eq=False)
class Evidence:
    """Per-document sums: enough to recompute every interval on a machine without torch."""

    document_sha256: tuple[str, ...]
    nll_sum: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    split: tuple[str, ...]
    choice_nll: npt.NDArray[np.float64] | None = None
    choice_items: npt.NDArray[np.int64] | None = None
    choice_answers: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class Measurement:
    """One subject under one scheme, as it came out of the engine."""

    subject: str
    scheme: str
    spec: str
    evidence: Evidence
    bits_per_weight: float
    seconds: float
    calibration_seed: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """What was planned and not measured, and why."""

    subject: str
    scheme: str | None
    reason: str


# ---------------------------------------------- what is concluded


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval around it."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """A measurement with its intervals; a row of `measurements` in audit.json."""

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


@dataclass(frozen=True)
class PooledScore:
    """A subject under a scheme over all draws of calibration text; a row of `pooled`."""

    subject: str
    scheme: str
    spec: str
    draws: int
    ce: Interval
    relative_error: Interval | None
    absolute_change: Interval | None
    perplexity: float
    bits_per_byte: float | None

    def over(self, score: Score) -> Score:
        """Return a draw's score with what all draws say in place of what it says."""
        return replace(
            score,
            ce=self.ce,
            relative_error=self.relative_error,
            absolute_change=self.absolute_change,
            perplexity=self.perplexity,
            bits_per_byte=self.bits_per_byte,
        )


@dataclass(frozen=True)
class Noise:
    """What the width of a relative error is made of; a row of `diagnostics.noise`.

    `documents` is the standard error of the mean over draws, `draw` the standard deviation of
    a single draw, `numerical` what rounding alone moved it by: the same sums in another order.
    All three are fractions of the loss in full precision; None is not measured. `share_of_draw`
    is the draw's part of the interval's squared width: what more documents would not lessen.
    """

    subject: str
    scheme: str
    draws: int
    interval: Interval | None
    documents: float | None
    draw: float | None
    share_of_draw: float | None
    numerical: float | None
    numerical_nats: float | None = None  # the same in nats per token


@dataclass(frozen=True)
class TaskScore:
    """Accuracy on multiple-choice items; the drop is normalized by what was left to get wrong."""

    subject: str
    scheme: str
    spec: str
    task: str
    accuracy: Interval
    accuracy_drop: Interval | None
    items: int


@dataclass(frozen=True)
class Comparison:
    """Two subjects under one scheme, paired on the same documents; negative favours `a`."""

    kind: Literal["outright", "difference_of_differences", "relative_error_difference"]
    unit: str
    scheme: str
    a: str
    b: str
    interval: Interval
    verdict: Literal["a_better", "b_better", "equivalent", "inconclusive"]


@dataclass(frozen=True)
class Finding:
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


@dataclass(frozen=True)
class Pick:
    """The one thing to ship under an objective, and how sure that is."""

    subject: str
    scheme: str
    objective: str
    runner_up: str | None
    interval: Interval | None  # against the runner-up, or what `reference` says
    confirmed_on: str | None  # the documents that it was not chosen on, if they agree
    reference: str | None = None  # the full-precision subject that the margin is counted from
    contenders: tuple[str, ...] = ()  # who may be as good, with all compared at once
    changes: tuple[str, ...] = ()  # what would make it another


@dataclass(frozen=True)
class Departure:
    """Who left a race in a round, and why.

    `behind` says how far behind the leader it will be on all documents to choose on; without,
    it could not be measured. `shown` says that this is more than noise.
    """

    subject: str
    behind: Interval | None
    shown: bool


@dataclass(frozen=True)
class Round:
    """What one round of a race showed."""

    documents: int  # to choose on, with those of the rounds before
    entrants: tuple[str, ...]
    leader: str | None
    left: tuple[Departure, ...]
    tokens: int  # evaluated in this round, over all entrants


@dataclass(frozen=True)
class Race:
    """How a race went, and what the documents that nobody was chosen on say of its winner."""

    rounds: tuple[Round, ...]
    winner: str | None
    runner_up: str | None = None
    interval: Interval | None = None  # of the winner's loss minus the runner-up's, held out
    confirmed_on: int | None = None  # that many documents, if they agree
    contenders: tuple[str, ...] = ()  # who was held against the winner and may be as good
    tokens: int = 0  # evaluated
    exhaustive_tokens: int = 0  # what it takes to measure everyone on everything


@dataclass(frozen=True)
class RaceCost:
    """What a race took beside the tokens that were evaluated; seconds are those of computing."""

    passes: int
    quantized: int  # of these, the passes that quantized: the others went on from kept weights
    calibration_tokens: int
    exhaustive_calibration_tokens: int
    seconds: float


@dataclass(frozen=True)
class Audit:
    """Everything that was planned, measured, skipped and concluded."""

    plan: Plan
    environment: dict[str, Any]
    protocol: dict[str, Any]
    subjects: tuple[Subject, ...]
    scores: tuple[Score, ...]
    tasks: tuple[TaskScore, ...]
    comparisons: tuple[Comparison, ...]
    findings: tuple[Finding, ...]
    pick: Pick | None
    skipped: tuple[Skipped, ...]
    pooled: tuple[PooledScore, ...] = ()  # where calibration was drawn several times
    diagnostics: dict[str, Any] = field(default_factory=dict)
    schema: str = "1"
    qaudit: str = ""


def digest(value: object) -> str:
    """Return the sha256 of a value's canonical JSON: the one way qaudit makes identities."""
    import json

    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
