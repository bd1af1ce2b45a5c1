"""Which draws are due: three of what decides, and more where draws are what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qaudit.core.registry import parse_scheme
from qaudit.planning.further import next_round
from qaudit.types import AuditRecord, Diagnostics, Further, Interval, Noise, Pass, Status
from tests.support import sample
from tests.support.verdicts import class_verdict, verdict

LABEL, GPTQ = "soup", "gptq-4bit"
PRICE = Further(6, 1, 1, 0, 1.0, 2.0)


def record(status: Status, share: float | None, available: int = 7) -> AuditRecord:
    """Return an audit about a method with one class, and the share of its draws in the width."""
    audit = sample.audit()
    noise = Noise(LABEL, GPTQ, 3, Interval(0.1, 0.0, 0.2), 0.01, 0.02, share, None)
    decided = class_verdict("4", status, subject=LABEL, scheme=GPTQ, runner_up=None)
    return replace(
        audit,
        plan=replace(
            audit.plan,
            further=PRICE,
            claim="method",
            specs=(parse_scheme(GPTQ).spec,),
            passes=(Pass(audit.subjects[-1], ()),),
        ),
        protocol={**audit.protocol, "calibration_draws": available},
        verdict=verdict(decided),
        diagnostics=Diagnostics(noise=(noise,)),
    )


def due(audit: AuditRecord, measured: int) -> list[int]:
    """Return the draws that are due once so many are measured."""
    rounds = [audit.plan.passes]
    soup = audit.subjects[-1]
    rounds += [(Pass(soup, (), draw=k),) for k in range(1, measured)]
    return [step.draw for step in next_round(audit.plan, rounds, audit)]


@pytest.mark.parametrize("status", ["ship", "hold", "undecided"])
def test_what_decides_is_drawn_three_times_whatever_it_is(status: Status) -> None:
    assert due(record(status, None), 1) == [1, 2]


@pytest.mark.parametrize(
    ("status", "share", "available", "measured", "expected"),
    [
        ("undecided", 0.8, 7, 3, [3, 4]),
        ("undecided", 0.8, 7, 5, [5, 6]),
        ("undecided", 0.8, 7, 7, []),
        ("undecided", 0.8, 5, 5, []),  # the text has no more
        ("undecided", 0.4, 7, 3, []),  # documents are missing
        ("ship", 0.8, 7, 3, []),
    ],
)
def test_a_class_that_is_undecided_by_its_draws_gets_two_more(
    status: Status, share: float, available: int, measured: int, expected: list[int]
) -> None:
    assert due(record(status, share, available), measured) == expected
