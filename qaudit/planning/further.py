"""The rounds of a plan: which passes are due when those before are measured and judged.

Searches come behind their candidates. Then it is known what ships. That one pair is rounded
otherwise, which shows what arithmetic moves. The plan prices the most that can be.
"""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.core.scheme import Scheme
from qaudit.planning.passes import (
    Pricing,
    calibrated,
    candidates_of,
    priced,
)
from qaudit.planning.price import seconds_range
from qaudit.types import (
    AuditRecord,
    Further,
    Pass,
    Plan,
    Price,
    Subject,
)


def next_round(
    plan: Plan, rounds: Sequence[Sequence[Pass]], record: AuditRecord | None
) -> tuple[Pass, ...]:
    """Return the passes that are due when `rounds` are measured; none when all is.

    `record` is what was judged of them, once the passes of the plan itself are measured.
    """
    planned = planned_rounds(plan.passes)
    if len(rounds) < len(planned):
        return planned[len(rounds)]
    assert record is not None, "the passes of the plan are measured"
    later = [step for some in rounds[len(planned) :] for step in some]
    return () if any(step.perturbed for step in later) else otherwise(plan, record)


def planned_rounds(passes: Sequence[Pass]) -> tuple[tuple[Pass, ...], ...]:
    """Return the passes that need nothing, then candidates, then searches, which look these up."""
    rounds = (
        tuple(step for step in passes if not step.subject.is_search),
        candidates_of(passes),
        tuple(step for step in passes if step.subject.is_search),
    )
    return tuple(filter(None, rounds))


def otherwise(plan: Plan, record: AuditRecord) -> tuple[Pass, ...]:
    """Return the pass that rounds what ships otherwise; data-free codes do not depend on it."""
    pick = record.pick
    if plan.otherwise is None or pick is None:
        return ()
    subject = next(s for s in record.subjects if s.label == pick.subject)
    for row in record.measurements:
        if (row.subject, row.scheme) == (pick.subject, pick.scheme) and row.calibrates:
            return (Pass(subject, (row.spec,), perturbed=True),)
    return ()


ARITHMETIC = 0.1
"""The most that rounding what ships otherwise may cost, as a part of the scan."""


def price_otherwise(
    subjects: Sequence[Subject],
    schemes: Sequence[Scheme],
    pricing: Pricing,
    passes: Sequence[Pass],
    machine: tuple[str, str],
) -> Further | None:
    """Return the price of rounding the dearest pair otherwise; None where it is too much."""
    pairs = (
        priced(Pass(subject, (scheme.spec,), perturbed=True), pricing).price
        for subject in subjects
        for scheme in calibrated(schemes)
    )
    price = max(pairs, key=lambda price: price.flops, default=Price())
    if not 0 < price.flops <= ARITHMETIC * sum(step.price.flops for step in passes):
        return None
    low, high = seconds_range(price.flops, *machine)
    return Further(price.streams, low, high)
