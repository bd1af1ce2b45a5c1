"""The rounds of a plan: which passes are due when those before are measured and judged.

Searches come behind their candidates. Then it is known what ships. That one pair is computed
otherwise, which shows what arithmetic moves: rounded otherwise, in another dtype, and on each kind
of device that parts ran on. The plan prices the most that can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qaudit.core.scheme import Scheme
from qaudit.planning.cost import seconds_range
from qaudit.planning.passes import (
    Pricing,
    calibrated,
    candidates_of,
    priced,
)
from qaudit.types import (
    FULL_PRECISION,
    AuditRecord,
    Further,
    Pass,
    Perturbation,
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
    if not any(step.perturbed for step in later) and (again := otherwise(plan, record)):
        return again
    return () if any(step.device for step in later) else on_other_devices(record)


def planned_rounds(passes: Sequence[Pass]) -> tuple[tuple[Pass, ...], ...]:
    """Return the passes that need nothing, then candidates, then searches, which look these up."""
    rounds = (
        tuple(step for step in passes if not step.subject.is_search),
        candidates_of(passes),
        tuple(step for step in passes if step.subject.is_search),
    )
    return tuple(filter(None, rounds))


def otherwise(plan: Plan, record: AuditRecord) -> tuple[Pass, ...]:
    """Return the passes that compute what ships otherwise; data-free codes do not depend on it."""
    kinds = [
        kind for kind in plan.perturbations if kind != "rounding" or _pair(record, calibrated=True)
    ]
    return tuple(replace(step, perturbed=kind) for step in _pair(record) for kind in kinds)


def on_other_devices(record: AuditRecord) -> tuple[Pass, ...]:
    """Return the passes of what ships on each kind of device that did not measure it."""
    kinds: Sequence[str] = record.environment.get("devices", ())
    measured: Mapping[str, str] = record.environment.get("measured_on", {})
    return tuple(
        replace(step, device=kind)
        for kind in kinds
        for step in _pair(record)
        if measured.get(step.subject.label, kind) != kind
    )


def _pair(record: AuditRecord, *, calibrated: bool = False) -> tuple[Pass, ...]:
    """Return a pass of the one subject and scheme that ships, if it is to be of that kind."""
    pick = record.pick
    if pick is None:
        return ()
    subject = next(s for s in record.subjects if s.label == pick.subject)
    for row in record.measurements:
        if (row.subject, row.scheme) == (pick.subject, pick.scheme):
            fits = row.scheme != FULL_PRECISION and (row.calibrates or not calibrated)
            return (Pass(subject, (row.spec,)),) if fits else ()
    return ()


ARITHMETIC = 0.1
"""The most that rounding what ships otherwise may cost, as a part of the scan."""


def fits_rounding(
    subjects: Sequence[Subject], schemes: Sequence[Scheme], pricing: Pricing, passes: Sequence[Pass]
) -> bool:
    flops = _dearest(subjects, calibrated(schemes), pricing, "rounding").flops
    return 0 < flops <= ARITHMETIC * sum(step.price.flops for step in passes)


def _dearest(
    subjects: Sequence[Subject],
    schemes: Sequence[Scheme],
    pricing: Pricing,
    perturbed: Perturbation,
) -> Price:
    pairs = (
        priced(Pass(subject, (scheme.spec,), perturbed=perturbed), pricing).price
        for subject in subjects
        for scheme in schemes
    )
    return max(pairs, key=lambda price: price.flops, default=Price())


def price_otherwise(
    subjects: Sequence[Subject],
    schemes: Sequence[Scheme],
    pricing: Pricing,
    perturbations: Sequence[Perturbation],
    machine: tuple[str, str],
) -> Further | None:
    steps = (_dearest(subjects, schemes, pricing, kind) for kind in perturbations)
    price = sum(steps, Price())
    low, high = seconds_range(price.flops, *machine)
    return Further(price.streams, low, high) if price.streams else None
