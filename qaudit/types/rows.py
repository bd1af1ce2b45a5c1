"""Intervals, and the rows of diagnostics in `audit.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, get_type_hints


class Row:
    """A dataclass whose intervals are three columns each."""

    nulls: ClassVar[Mapping[str, float]] = {}
    """What null stands for in fields that always hold a number."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Fold columns before a row is validated, and spread intervals when it is written."""
        from pydantic_core import core_schema

        row = handler(source)
        return core_schema.no_info_before_validator_function(
            partial(_fold, cls),
            {name: part for name, part in row.items() if name != "ref"},
            ref=row["ref"],  # or the second use of a row in a document would leave the hook out
            serialization=core_schema.wrap_serializer_function_ser_schema(
                lambda row, write: _spread(cls, write(row))
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        reference = handler(schema)
        row = handler.resolve_ref_schema(reference)
        described, required = row["properties"], row.get("required", [])
        for name, (columns, _) in _columns_of(cls).items():
            described |= {column: {"type": ["number", "null"]} for column in columns}
            required += [c for c in columns if name in required and c not in required]
            if name not in columns:
                del described[name]
                required = [column for column in required if column != name]
        described |= {column: {"type": ["number", "null"]} for column in cls.nulls}
        row["required"] = [name for name in described if name in required]
        return reference


@dataclass(frozen=True)
class Interval(Row):
    """An estimate and the interval around it."""

    nulls: ClassVar[Mapping[str, float]] = {
        "estimate": math.inf,
        "low": -math.inf,
        "high": math.inf,
    }

    estimate: float
    low: float
    high: float


_COLUMNS: dict[type, dict[str, tuple[tuple[str, str, str], bool]]] = {}
"""By the type of a row: the columns of each interval, and whether there may be none."""


def _columns_of(kind: type[Row]) -> dict[str, tuple[tuple[str, str, str], bool]]:
    if kind not in _COLUMNS:
        plain = {"interval": ("estimate", "low", "high")}
        _COLUMNS[kind] = {
            name: (plain.get(name, (name, f"{name}_low", f"{name}_high")), hint is not Interval)
            for name, hint in get_type_hints(kind).items()
            if hint is Interval or hint == Interval | None
        }
    return _COLUMNS[kind]


def _spread(kind: type[Row], row: dict[str, Any]) -> dict[str, Any]:
    intervals, spread = _columns_of(kind), dict[str, Any]()
    for name, value in row.items():
        if name in intervals:
            spread |= zip(intervals[name][0], value.values() if value else (None,) * 3, strict=True)
        else:
            spread[name] = value
    return spread


def _fold(kind: type[Row], row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    # Behind a function pydantic takes no list for a tuple.
    row = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
    for name, (columns, optional) in _columns_of(kind).items():
        if columns[0] in row:
            pairs = zip(Interval.nulls, columns, strict=True)
            bounds = {bound: row.pop(column) for bound, column in pairs if column in row}
            absent = bounds["estimate"] is None and optional
            row[name] = None if absent else bounds
    return {name: kind.nulls.get(name) if v is None else v for name, v in row.items()}


@dataclass(frozen=True)
class CellRow(Row):
    """What is measured of a subject under a scheme."""

    subject: str
    scheme: str
    spec: str

    @property
    def cell(self) -> tuple[str, str]:
        return self.subject, self.scheme


@dataclass(frozen=True, kw_only=True)
class ErrorRow(CellRow):
    """Loss and errors on a part of the text.

    The intervals of one subject under one scheme hold at once. None is not measured.
    """

    documents: int  # that have such tokens
    tokens: int
    ce: Interval  # nats per token
    relative_error: Interval | None
    absolute_change: Interval | None  # nats per token
    kl: Interval | None = None  # divergence to full precision, nats per token


@dataclass(frozen=True, kw_only=True)
class StratumRow(ErrorRow):
    """Loss and errors on the documents of one stratum."""

    stratum: str
    is_worst: bool = False  # of all strata, by relative error


@dataclass(frozen=True, kw_only=True)
class PositionRow(ErrorRow):
    """Loss and errors of tokens by where in their window they are.

    Of rollouts, positions count from the prompt's end, prompts take the place of documents, and
    ends are as in `RolloutRow`.
    """

    first: int  # position in the window, from 0
    last: int
    end_of_turn: Interval | None = None
    end_of_reasoning: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class RoleRow(ErrorRow):
    """Loss and errors of tokens by their role in a conversation.

    Of rollouts, prompts take the place of documents, and ends are as in `RolloutRow`.
    """

    role: str  # prompt, reasoning, call or answer
    end_of_turn: Interval | None = None
    end_of_reasoning: Interval | None = None


@dataclass(frozen=True)
class RolloutRow(CellRow):
    """What a stream makes of rollouts, on the first draw; intervals are over prompts.

    None is not measured: divergence needs greedy rollouts, ends the tokens that end something.
    """

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
class RoutingRow(CellRow):
    """How far one layer's router chooses other experts than in full precision.

    The intervals of one subject under one scheme hold at once.
    """

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


@dataclass(frozen=True)
class WeightRow:
    """What the weights of a tensor, a role or a whole model look like to a quantizer.

    Keys of `grid_distance` and `grid_drift` are numbers of bits, those of `perturbation` the
    display names of schemes. None is not measured.
    """

    subject: str
    part: Literal["model", "role", "tensor"]
    name: str
    weights: int
    kurtosis: float | None  # excess: 0 for a normal distribution; None where all are equal
    outlier_share: float  # a fraction of the weights
    effective_range: float | None  # largest minus smallest of a group, over its deviation
    grid_distance: dict[str, float] = field(default_factory=dict)  # RMS, in steps of the grid
    perturbation: dict[str, float] = field(default_factory=dict)  # its norm over the weights' norm
    previous: str | None = None  # the checkpoint that drift and movement are counted from
    grid_drift: dict[str, float] = field(default_factory=dict)  # of `grid_distance`
    movement: float | None = None  # norm of the difference over the norm of the previous
    details: str | None = None  # the file beside audit.json that holds every tensor's row


@dataclass(frozen=True)
class SensitivityRow(CellRow):
    """What one part of a model, quantized alone, adds to its loss; or all of it."""

    part: Literal["role", "layers", "all"]
    name: str
    bits: int
    bits_per_weight: float
    weights: int
    absolute_change: Interval | None  # nats per token
    relative_error: Interval | None
    share: Interval | None = None  # of what all parts of its kind add, each by itself
    predicted: float | None = None  # nats per token, the sum of what its parts add
    documents: int = 0
    evidence: str = ""
    evidence_sha256: str = ""


@dataclass(frozen=True)
class NotDiagnosed:
    """A diagnostic that one subject went without, and why; a row of `diagnostics.skipped`."""

    subject: str
    diagnostic: str
    reason: str


@dataclass(frozen=True)
class CurvatureRow(Row):
    """How sharp the loss is at a subject, along all its parameters or some; None: not measured.

    The Hessian is that of the mean loss of a token, in nats, over the documents named by
    `documents_sha256`: the hash of their hashes.
    """

    subject: str
    part: Literal["model", "role", "layer"]
    name: str
    parameters: int
    trace: Interval  # over the probes, on these documents
    trace_elsewhere: Interval | None = None  # over documents too: on others like these
    eigenvalues: tuple[float, ...] = ()  # the largest, in order
    residuals: tuple[float, ...] = ()  # an eigenvalue is within so much of each
    smallest: float | None = None  # the lowest eigenvalue seen on the way
    loss: float | None = None  # nats per token, on these documents
    probes: int = 0
    products: int = 0  # with the Hessian, for trace and eigenvalues
    documents: int = 0
    tokens: int = 0  # scored
    documents_sha256: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlaneRow(CellRow):
    """The loss at one point of a slice, theta + a * v + b * u.

    v leads to the checkpoint before and u to the weights that a scheme makes of theta.
    """

    a: float
    b: float
    ce: Interval  # nats per token
    absolute_change: Interval  # from theta, paired by document
    previous: str | None = None  # the checkpoint at a = 1; None: only the slice along b was taken
    documents: int = 0
    tokens: int = 0
    documents_sha256: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Noise(Row):
    """What the width of a relative error is made of; a row of `diagnostics.noise`.

    `documents` is the standard error over documents, `draw` the standard deviation over draws of
    calibration text, `numerical` what arithmetic alone moved it by: what enters each block, by
    about what rounding in one block makes, and other batches. All are fractions of the loss in
    full precision; None is not measured. `kl_floor` and `top1_floor` are what the same moved KL
    divergence (nats per token) and agreement by; for full precision, its own from what it is
    unperturbed.
    """

    subject: str
    scheme: str
    draws: int
    interval: Interval | None
    documents: float | None
    draw: float | None
    numerical: float | None
    numerical_nats: float | None = None  # the same in nats per token
    kl_floor: float | None = None
    top1_floor: float | None = None
    unit: Literal["fraction"] = "fraction"


@dataclass(frozen=True)
class ShippedRow(CellRow):
    """A file that is quantized already among those of its base; a row of `diagnostics.shipped`.

    Rows are in the order of KL divergence. `dominated_by` names what takes no more bytes and
    diverges less, paired by document, all pairs at once; `looks_broken` says what was seen.
    """

    format: str
    bits: int | None  # of most codes
    nbytes: int | None
    kl: Interval | None
    dominated_by: tuple[str, ...] = ()
    looks_broken: tuple[str, ...] = ()


@dataclass(frozen=True)
class GreedyCandidate:
    """A candidate of a greedy search and its own quantized loss; None is not finite."""

    label: str
    loss: float | None


@dataclass(frozen=True)
class GreedyTrial:
    """A mean that a greedy search tried: the members so far and one more."""

    added: str
    loss: float | None
    taken: bool


@dataclass(frozen=True)
class GreedySearch:
    """A greedy search: its candidates, the best first, and its trials, in order."""

    label: str
    scheme: str
    documents: int  # that it chose on
    candidates: tuple[GreedyCandidate, ...]
    trials: tuple[GreedyTrial, ...]
    members: tuple[str, ...]
    loss: float | None
    spec: str = ""
    further: bool = False  # whether these are no documents that a verdict reads

    @property
    def counted(self) -> int:
        """Return how many means the soup was chosen among on the documents that judge it."""
        return 0 if self.further else len(self.trials)


@dataclass(frozen=True)
class Diagnostics:
    """The tables of diagnostics; one that was not requested is empty, and is not in JSON."""

    greedy: tuple[GreedySearch, ...] = ()
    weights: tuple[WeightRow, ...] = ()
    sensitivity: tuple[SensitivityRow, ...] = ()
    curvature: tuple[CurvatureRow, ...] = ()
    plane: tuple[PlaneRow, ...] = ()
    skipped: tuple[NotDiagnosed, ...] = ()
    noise: tuple[Noise, ...] = ()
    phases: tuple[Course, ...] = ()
    strata: tuple[StratumRow, ...] = ()
    positions: tuple[PositionRow, ...] = ()
    roles: tuple[RoleRow, ...] = ()
    rollouts: tuple[RolloutRow, ...] = ()
    rollout_roles: tuple[RoleRow, ...] = ()
    rollout_positions: tuple[PositionRow, ...] = ()
    routing: tuple[RoutingRow, ...] = ()
    shipped: tuple[ShippedRow, ...] = ()
    others: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)
    """Tables of diagnostics whose rows have no type here, by name."""
