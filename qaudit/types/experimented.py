"""What an experiment of the laboratory showed, over seeds: the truth behind its page and picture.

Documents tell how well one pair of models is compared. Only seeds tell of training, so that a
claim about training is judged by the interval over seeds, and by nothing with one seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qaudit.types.judged import Interval

Measure = Literal["error", "lost", "loss"]
"""Relative error, what quantization adds in nats, or the loss itself in nats per token."""

Expectation = Literal["higher", "lower", "near"]
"""What a study leads one to expect of `a` against `b`."""

Standing = Literal["agrees", "disagrees", "inconclusive", "open", "not measured"]
"""How a contrast stands to what was expected; `open` where no study says anything."""


@dataclass(frozen=True)
class Claim:
    """A sentence of a study that an experiment asks about."""

    name: str
    source: str
    says: str


@dataclass(frozen=True)
class Contrast:
    """Two models that differ in one thing; what is told of them is `a` minus `b`."""

    claim: str
    says: str
    a: str
    b: str
    measure: Measure
    scheme: str
    expect: Expectation | None = None
    margin: float = 0.0  # what counts as near


@dataclass(frozen=True)
class SeedEstimate:
    """A contrast in the models of one seed, with the interval over documents."""

    seed: int
    interval: Interval


@dataclass(frozen=True)
class ContrastResult:
    """A contrast over all seeds; the interval is over seeds, and none with fewer than two."""

    contrast: Contrast
    seeds: tuple[SeedEstimate, ...]
    interval: Interval | None
    standing: Standing


@dataclass(frozen=True)
class SeedPoint:
    """One model of one seed under one scheme."""

    seed: int
    subject: str
    scheme: str
    loss: float  # in full precision, nats per token
    quantized: float
    interval: Interval  # of the relative error, over documents


@dataclass(frozen=True)
class ExperimentSummary:
    """An experiment at one size, over all seeds that were measured."""

    experiment: str
    size: str
    description: str
    command: str
    seeds: tuple[int, ...]
    parameters: int
    tokens: int  # that one seed trains on
    documents: int
    confidence: float
    subjects: tuple[str, ...]
    claims: tuple[Claim, ...]
    results: tuple[ContrastResult, ...]
    points: tuple[SeedPoint, ...]
    environment: dict[str, str]
    notes: tuple[str, ...] = ()
