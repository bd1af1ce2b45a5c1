"""The rounds of a plan: which passes are due when those before are measured and judged.

Everything comes first on the first draw of calibration text, and searches behind their candidates.
Then it is known what ships. Under a claim about a method, what decides is measured on further
draws. The one pair that ships is computed otherwise, which shows what arithmetic moves: rounded
otherwise, in another dtype, and on each kind of device that parts ran on. The plan prices the most
that can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Scheme
from qaudit.judge.table import Cell
from qaudit.planning.cost import seconds_range
from qaudit.planning.passes import (
    Pricing,
    calibrated,
    candidates_of,
    draw_of,
    planned_class,
    priced,
)
from qaudit.text.corpus import DRAWS
from qaudit.types import (
    FULL_PRECISION,
    AuditRecord,
    Further,
    Pass,
    Perturbation,
    Plan,
    Price,
    Subject,
    Traffic,
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
    is_drawn = any(step.perturbed or step.device for step in later)
    draws = 1 + max((step.draw for step in later), default=0)
    if not is_drawn and (drawn := further_draws(plan, record, draws)):
        return drawn
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


def further_draws(plan: Plan, record: AuditRecord, measured: int = 1) -> tuple[Pass, ...]:
    """Return the passes that measure again what decides, or what lacks draws when it was drawn."""
    available = record.protocol.get("calibration_draws", 1)
    wanted = next((number for number in DRAWS if measured < number <= available), None)
    if plan.further is None or wanted is None:
        return ()
    draws = range(measured, wanted)
    cells = deciding(record) if measured == 1 else lacking_draws(record)
    schemes = {scheme.short: scheme for scheme in calibrated(parse_schemes(plan.specs))}
    passes: list[Pass] = []
    prices = {step.subject.label: step.price for step in reversed(plan.passes)}  # of the first pass
    for subject in record.subjects:
        drawn = [scheme for name, scheme in schemes.items() if (subject.label, name) in cells]
        if drawn:
            price = prices.get(subject.label, Price())
            passes += [replace(draw_of(subject, drawn, n), price=price) for n in draws]
    return tuple(passes)


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


def deciding(record: AuditRecord) -> tuple[Cell, ...]:
    """Return the cells that decide: the pick and the runner-up of each bit class."""
    cells: list[tuple[str | None, str | None]] = []
    for decision in record.verdict.classes if record.verdict else ():
        cells += [
            (decision.subject, decision.scheme),
            (decision.runner_up, decision.runner_up_scheme),
        ]
    return tuple(dict.fromkeys((label, name) for label, name in cells if label and name))


def lacking_draws(record: AuditRecord) -> tuple[Cell, ...]:
    """Return what decides a class that is undecided by its draws more than by its documents."""
    share = {(row.subject, row.scheme): row.share_of_draw for row in record.diagnostics.noise}
    cells: list[tuple[str | None, str | None]] = []
    for decision in record.verdict.classes if record.verdict else ():
        ships = (str(decision.subject), str(decision.scheme))
        if decision.status == "undecided" and (share.get(ships) or 0.0) > 0.5:
            cells += [ships, (decision.runner_up, decision.runner_up_scheme)]
    return tuple(dict.fromkeys((label, name) for label, name in cells if label and name))


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
    return Further(0, price.streams, price.nbytes_read, 0, low, high) if price.streams else None


def price_further(
    subjects: Sequence[Subject],
    schemes: Sequence[Scheme],
    pricing: Pricing,
    traffic: Traffic | None,
    machine: tuple[str, str],
) -> Further:
    draws = pricing.text.draws or DRAWS[-1]
    cells = list(_largest_cells(subjects, calibrated(schemes), pricing))
    price = sum((price_of_draw for _, price_of_draw in cells for _ in range(1, draws)), Price())
    low, high = seconds_range(price.flops, *machine)
    evicted = traffic is not None and traffic.nbytes_disk_budget is not None
    on_hub = (c.nbytes for subject, _ in cells for c, _ in subject.members if c.commit is not None)
    return Further(
        draws=draws - 1,
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
