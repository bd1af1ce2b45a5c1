"""A race: its rounds, its winner, and what it took."""

from __future__ import annotations

from dataclasses import dataclass

from qaudit.types.rows import Interval, Row


@dataclass(frozen=True)
class Departure:
    """A subject that left a race in a round, and why.

    `behind` is its distance from the leader, predicted for all documents to choose on; None: it
    could not be measured. `shown`: that distance is more than noise.
    """

    subject: str
    behind: Interval | None
    shown: bool


@dataclass(frozen=True)
class Round:
    """One round of a race."""

    documents: int  # to choose on, with those of the rounds before
    entrants: tuple[str, ...]
    leader: str | None
    left: tuple[Departure, ...]
    tokens: int  # evaluated in this round, over all entrants


@dataclass(frozen=True)
class Race(Row):
    """A race: its rounds, and its winner on documents that were not used to choose it."""

    rounds: tuple[Round, ...]
    winner: str | None
    runner_up: str | None = None
    interval: Interval | None = None  # of the winner's loss minus the runner-up's, held out
    confirmed_on: int | None = None  # that many documents, if they agree
    contenders: tuple[str, ...] = ()  # compared with the winner, and may be as good
    tokens: int = 0  # evaluated
    exhaustive_tokens: int = 0  # to measure every subject on every document


@dataclass(frozen=True)
class RaceCost:
    """What a race took beside the tokens that were evaluated; seconds are those of computing."""

    passes: int
    quantized: int  # of these, the passes that quantized: the others reused stored weights
    calibration_tokens: int
    exhaustive_calibration_tokens: int
    seconds: float
