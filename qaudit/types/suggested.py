"""Which checkpoints of a series are worth measuring next, by what is measured already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qaudit.types.rows import Interval

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
