"""The rounds of a plan: which passes are due when those before are measured and judged.

Everything comes first on the first draw of calibration text, and searches behind their candidates.
Another draw is another quantized model: what decides is then known, and it alone is measured on
further draws. The plan prices the most that can be: for each bit class the subject and scheme that
ships and its runner-up. Where parts ran on several kinds of devices, one checkpoint and one soup
are measured on each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Scheme
from qaudit.judge.table import Cell
from qaudit.planning.classes import planned_class
from qaudit.planning.cost import seconds_range
from qaudit.planning.passes import Pricing, calibrated, candidates_of, draw_of, priced
from qaudit.text.corpus import DRAWS
from qaudit.types import AuditRecord, Further, Pass, Plan, Price, Subject, Traffic


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
    if not later and (drawn := further_draws(plan, record)):
        return drawn
    return () if any(step.device for step in later) else on_other_devices(plan, record)


def planned_rounds(passes: Sequence[Pass]) -> tuple[tuple[Pass, ...], ...]:
    """Return the passes that need nothing, then candidates, then searches, which look these up."""
    rounds = (
        tuple(step for step in passes if not step.subject.is_search),
        candidates_of(passes),
        tuple(step for step in passes if step.subject.is_search),
    )
    return tuple(filter(None, rounds))


def further_draws(plan: Plan, record: AuditRecord) -> tuple[Pass, ...]:
    """Return the passes that measure again what decides; none where nothing is drawn again."""
    if plan.further is None:
        return ()
    draws = range(1, record.protocol.get("calibration_draws", 1))
    cells = deciding(record)
    schemes = {scheme.short: scheme for scheme in calibrated(parse_schemes(plan.specs))}
    passes: list[Pass] = []
    prices = {step.subject.label: step.price for step in reversed(plan.passes)}  # of the first pass
    for subject in record.subjects:
        drawn = [scheme for name, scheme in schemes.items() if (subject.label, name) in cells]
        if drawn:
            price = prices.get(subject.label, Price())
            passes += [replace(draw_of(subject, drawn, n), price=price) for n in draws]
    return tuple(passes)


def on_other_devices(plan: Plan, record: AuditRecord) -> tuple[Pass, ...]:
    """Return the passes of the last checkpoint and soup on each other kind of device."""
    kinds: Sequence[str] = record.environment.get("devices", ())
    measured: Mapping[str, str] = record.environment.get("measured_on", {})
    return tuple(
        replace(step, device=kind)
        for kind in kinds
        for step in plan.passes
        if step.perturbed is None
        and not step.draw
        and measured.get(step.subject.label, kind) != kind
    )


def deciding(record: AuditRecord) -> tuple[Cell, ...]:
    """Return the cells that decide: the pick and the runner-up of each bit class."""
    cells: list[tuple[str | None, str | None]] = []
    for decision in record.verdict.classes if record.verdict else ():
        cells += [
            (decision.subject, decision.scheme),
            (decision.runner_up, decision.runner_up_scheme),
        ]
    return tuple(dict.fromkeys((label, name) for label, name in cells if label and name))


# ------------------------------------------------------------------------------ the upper price


def price_further(
    subjects: Sequence[Subject],
    schemes: Sequence[Scheme],
    pricing: Pricing,
    traffic: Traffic | None,
    machine: tuple[str, str],
) -> Further:
    """Return the most that further draws can cost."""
    cells = list(_largest_cells(subjects, calibrated(schemes), pricing))
    price = sum((price_of_draw for _, price_of_draw in cells for _ in range(1, DRAWS)), Price())
    low, high = seconds_range(price.flops, *machine)
    evicted = traffic is not None and traffic.nbytes_disk_budget is not None
    on_hub = (c.nbytes for subject, _ in cells for c, _ in subject.members if c.commit is not None)
    return Further(
        draws=DRAWS - 1,
        streams=price.streams,
        nbytes_read=price.nbytes_read,
        nbytes_to_fetch=sum(on_hub) if evicted else 0,
        seconds_low=low,
        seconds_high=high,
    )


def _largest_cells(
    subjects: Sequence[Subject], drawn: Sequence[Scheme], pricing: Pricing
) -> Iterator[tuple[Subject, Price]]:
    """Yield the two most expensive cells of each bit class."""
    classes: dict[str, list[Scheme]] = {}
    for scheme in drawn:
        classes.setdefault(planned_class(scheme, pricing.sizes), []).append(scheme)
    for some in classes.values():
        cells = [
            (s, priced(draw_of(s, [scheme], 1), pricing).price) for s in subjects for scheme in some
        ]
        yield from sorted(cells, key=lambda one: (one[1].flops, one[1].nbytes_read))[-2:]
