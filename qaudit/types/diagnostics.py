"""What diagnostics measured: the typed tables of `audit.diagnostics`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from qaudit.types.courses import Course, PositionRow, RoleRow, RolloutRow, RoutingRow, StratumRow
from qaudit.types.rows import Interval, Row


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
class SensitivityRow(Row):
    """What one part of a model, quantized alone, adds to its loss; or a mixture, or all of it."""

    subject: str
    scheme: str
    spec: str
    part: Literal["role", "layers", "all", "mixture"]
    name: str
    bits: int | None  # None: of a mixture
    bits_per_weight: float
    weights: int
    absolute_change: Interval | None  # nats per token
    relative_error: Interval | None
    share: Interval | None = None  # of what all parts of its kind add, each by itself
    predicted: float | None = None  # nats per token, the sum of what its parts add
    mixture: dict[str, int] = field(default_factory=dict)  # role -> bits
    budget: float | None = None  # bits per weight
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
class PlaneRow(Row):
    """The loss at one point of a slice, theta + a * v + b * u.

    v leads to the checkpoint before and u to the weights that a scheme makes of theta.
    """

    subject: str
    scheme: str
    spec: str
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
class ShippedRow(Row):
    """A file that is quantized already among those of its base; a row of `diagnostics.shipped`.

    Rows are in the order of KL divergence. `dominated_by` names what takes no more bytes and
    diverges less, paired by document, all pairs at once; `looks_broken` says what was seen.
    """

    subject: str
    scheme: str
    spec: str
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
