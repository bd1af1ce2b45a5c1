"""What ships, in which form, and how sure that is: one value that every surface shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qaudit.types.rows import Interval, Row

Status = Literal["ship", "hold", "undecided"]
"""`hold`: a rule is breached. `undecided`: a rule, or a measurement, is missing or inconclusive."""


@dataclass(frozen=True)
class ClassVerdict(Row):
    """The subject and scheme that ships of one bit class, and whether it may."""

    bit_class: str  # "4": four bits per weight
    level: Literal["error", "warn", "off"]  # what the policy makes of this class
    status: Status
    subject: str | None  # None: nothing of this class was measured
    scheme: str | None
    objective: str
    ce: Interval | None = None  # of all documents, pooled over draws, nats per token
    relative_error: Interval | None = None  # a fraction; where the rule bounds it, as it was judged
    kl: Interval | None = None  # of all documents, nats per token
    rule: str | None = None  # of the policy, the one that decides
    margin: float | None = None  # of that rule, in its unit
    unit: Literal["fraction", "nats"] | None = None  # of the margin
    runner_up: str | None = None
    runner_up_scheme: str | None = None
    lead: Interval | None = None  # loss minus the runner-up's, on documents it was not chosen on
    reference: str | None = None  # in full precision; then `lead` is the excess over its loss
    confirmed_on: str | None = None  # those documents, if they agree
    contenders: tuple[str, ...] = ()  # `subject at scheme` that may be as good
    changes: tuple[str, ...] = ()  # what would make it another
    draws: int = 1  # of calibration text
    breaches: tuple[str, ...] = ()  # which rules are breached, and by how much
    warnings: tuple[str, ...] = ()  # of rules that do not decide
    needs: tuple[str, ...] = ()  # what would decide: documents, draws, a missing measurement

    def __post_init__(self) -> None:
        """Refuse a subject under no scheme: no card can name it."""
        if self.subject is not None and self.scheme is None:
            raise ValueError("has a `subject` without a `scheme`")


@dataclass(frozen=True)
class Verdict:
    """One line for each bit class, under a policy: the answer of `qaudit gate`."""

    policy: str
    objective: str
    confidence: float
    classes: tuple[ClassVerdict, ...]
    status: Status  # the worst of the classes whose level is `error`, and of `others`
    others: tuple[str, ...] = ()  # errors of the policy that are about no class
