"""What was found of the loss around a subject: its curvature, and slices through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qaudit.types.judged import Interval


@dataclass(frozen=True)
class CurvatureRow:
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
    residuals: tuple[float, ...] = ()  # an eigenvalue lies within so much of each
    smallest: float | None = None  # the lowest eigenvalue seen on the way
    loss: float | None = None  # nats per token, on these documents
    probes: int = 0
    products: int = 0  # with the Hessian, for trace and eigenvalues
    documents: int = 0
    tokens: int = 0  # scored
    documents_sha256: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlaneRow:
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
