"""Where an error is: rows by group of documents, and by position in the window."""

from __future__ import annotations

from dataclasses import dataclass

from qaudit.types.rows import Interval, Row


@dataclass(frozen=True)
class StratumRow(Row):
    """Loss and errors on the documents of one stratum, over all draws of calibration text.

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
    """Loss and errors of tokens by where in their window they are, over all draws.

    The intervals of one subject under one scheme hold at once. None is not measured.
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
