"""The results of an experiment, over seeds.

Documents bound how well one pair of models is compared. Only seeds vary the training, so that a
claim about training is judged by the interval over seeds, and one seed alone decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qaudit.types.rows import Interval

Measure = Literal["error", "lost", "loss", "kl", "trace"]
"""Relative error, what quantization adds in nats, the loss itself in nats per token, KL from full
precision in nats per token, or the logarithm of the Hessian's trace in full precision."""

Expectation = Literal["higher", "lower", "near"]
"""The sign or size of `a` minus `b` that a study suggests."""

Standing = Literal["agrees", "disagrees", "inconclusive", "open", "too wide", "not measured"]
"""A contrast against its expectation; `open` where no study has one, `too wide` where a margin is
larger than both of the errors that it bounds: it could not come out otherwise."""


@dataclass(frozen=True)
class Claim:
    """A sentence of a study that an experiment tests."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - it is a key of experiment files

    name: str
    source: str
    says: str


@dataclass(frozen=True)
class Contrast:
    """Two models that differ in one thing, compared as `a` minus `b` under a scheme."""

    claim: str
    says: str
    a: str
    b: str
    measure: Measure
    scheme: str
    expect: Expectation | None = None
    margin: float = 0.0  # within which `near` agrees


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
    tokens: int  # trained on per seed
    documents: int
    confidence: float
    subjects: tuple[str, ...]
    claims: tuple[Claim, ...]
    results: tuple[ContrastResult, ...]
    points: tuple[SeedPoint, ...]
    environment: dict[str, str]
    notes: tuple[str, ...] = ()
