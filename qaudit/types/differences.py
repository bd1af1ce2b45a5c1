"""Two audits held against each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qaudit.types.conclusions import Pick
from qaudit.types.rows import Interval

Reading = Literal["worse", "better", "unclear", "same"]
"""Of b against a. `same` is equal to the bit; `unclear` is not known to be equal."""


@dataclass(frozen=True)
class Changed:
    """One thing that is not the same in both, as text; None is not there."""

    what: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class Delta:
    """One subject under one scheme, b minus a: positive is worse."""

    subject: str
    scheme: str
    loss: Interval | None  # in the unit of the difference; None where that means nothing
    loss_reading: Reading | None
    relative_error: Interval | None  # a fraction; None for full precision
    error_reading: Reading | None
    documents: int
    kl: Interval | None = None  # divergence to full precision, nats per token
    kl_reading: Reading | None = None


@dataclass(frozen=True)
class TaskDelta:
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
        return _named(self.picks[0]) != _named(self.picks[1])


def _named(pick: Pick | None) -> tuple[str, str] | None:
    return None if pick is None else (pick.subject, pick.scheme)
