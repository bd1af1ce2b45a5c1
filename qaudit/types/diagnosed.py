"""What diagnostics found: one row each in `audit.diagnostics`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qaudit.types.judged import Interval


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
class SensitivityRow:
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
