"""The work of a plan: which passes there are, what each costs, and when they are due. No torch.

A pass sends one subject once through its blocks. Each subject has one; every further draw of
calibration text is another pass of what calibrates. A greedy soup is one entry: its passes are
chosen while it runs, and it is priced at their upper bound. Searches come behind their candidates.
Then it is known what ships. That one pair is rounded otherwise, which shows what arithmetic moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qaudit.core.registry import parse_scheme, parse_schemes
from qaudit.core.scheme import Calibration, Scheme, class_of_stored
from qaudit.errors import UsageError
from qaudit.planning.price import Load, flops, seconds_range
from qaudit.planning.sizes import Sizes, TextSize
from qaudit.settings import SEARCHED_AT
from qaudit.types import (
    GREEDY,
    AuditRecord,
    Further,
    Pass,
    Plan,
    Price,
    Recipe,
    Subject,
)


@dataclass(frozen=True)
class Pricing:
    """What the price of a pass is made of."""

    sizes: Sizes  # of the largest model
    text: TextSize
    diagnostics: Price  # of one subject

    def flops(
        self, schemes: Sequence[Scheme], *, items: bool = False, full_precision: int = 1
    ) -> float:
        """Return the arithmetic of one pass: schemes, and full precision beside them.

        Items of tasks and rollouts are a part of a subject's first pass alone.
        """
        text = self.text if items else self.text.of_documents
        return flops(self.sizes, Load.of(schemes, text, full_precision))


def passes_of(
    subjects: Sequence[Subject],
    schemes: Sequence[Scheme],
    repeats: int,
    pricing: Pricing,
    reference: Subject | None = None,
) -> tuple[Pass, ...]:
    """Return the passes of a plan; the reference runs beside every other subject."""
    drawn = calibrated(schemes)
    passes: list[Pass] = []
    for subject in subjects:
        first = priced(Pass(subject, _specs(schemes)), pricing)
        price = first.price + pricing.diagnostics
        if subject.is_search:  # each candidate on further documents, and each mean of two or more
            largest = sorted((c.nbytes for c, _ in subject.members), reverse=True)
            means = (sum(largest[:count]) for count in range(2, len(largest) + 1))
            trials = [*largest, *means]
            work = pricing.flops([scheme_of(subject, schemes)])
            price += Price(len(trials) * work, sum(trials), 2 * len(trials))
        elif reference is not None and reference != subject:
            one_stream = replace(pricing.text, item_tokens=0, calibration_tokens=0)
            work = flops(pricing.sizes, Load.of((), one_stream))
            price += _reading(reference) + Price(work, 0, 1)
            first = replace(first, reference=reference)
        passes.append(replace(first, price=price))
        if repeats > 1 and drawn:
            draw = priced(Pass(subject, _specs(drawn), full_precision=False, draw=1), pricing)
            passes += [replace(draw, draw=number) for number in range(1, repeats)]
    return tuple(passes)


def with_draws(recipe: Recipe, schemes: Sequence[Scheme]) -> Recipe:
    """Return the recipe with as many draws of calibration text as its schemes need."""
    return recipe if calibrated(schemes) else replace(recipe, repeats=1)


def calibrated(schemes: Sequence[Scheme]) -> tuple[Scheme, ...]:
    return tuple(s for s in schemes if s.calibration is not Calibration.NONE)


def scheme_of(search: Subject, schemes: Sequence[Scheme]) -> Scheme:
    """Return the scheme at which a greedy soup is searched; it must be one that is measured."""
    _, _, named = (search.merge or "").partition("scheme=")
    wanted = parse_scheme(named or SEARCHED_AT)
    match = next((scheme for scheme in schemes if scheme.spec == wanted.spec), None)
    if match is not None:
        return match
    if named:
        raise UsageError(
            f"soup `{search.label}` is searched for at `{wanted.short}`, which is not measured",
            hint=f"add it: `--schemes {','.join(s.short for s in (*schemes, wanted))}`",
        )
    return min(schemes, key=lambda scheme: scheme.short)


def candidates_of(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Return the passes of what searches rank first, where no pass measures it: the candidates."""
    plain = [step for step in passes if not step.draw and not step.perturbed]
    taken = {(p.subject.content, spec) for p in plain for spec in p.schemes}
    candidates: list[Pass] = []
    for step in plain:
        if not step.subject.is_search:
            continue
        spec = scheme_of(step.subject, parse_schemes(step.schemes)).spec
        flops_of_stream = step.price.flops / max(1, step.price.streams)
        for checkpoint, _ in step.subject.members:
            alone = Subject(checkpoint.label, ((checkpoint, 1.0),))
            if (alone.content, spec) not in taken:
                taken.add((alone.content, spec))
                price = Price(2 * flops_of_stream, checkpoint.nbytes, 2)  # full precision beside it
                candidates.append(Pass(alone, (spec,), full_precision=False, price=price))
    return tuple(candidates)


def with_scheme(search: Subject, schemes: Sequence[Scheme]) -> Subject:
    """Return a search whose scheme is written out."""
    merge = f"{GREEDY}:scheme={scheme_of(search, schemes).spec}"
    return Subject(search.label, search.members, merge)


def _specs(schemes: Sequence[Scheme]) -> tuple[str, ...]:
    return tuple(scheme.spec for scheme in schemes)


def priced(one: Pass, pricing: Pricing) -> Pass:
    """Return a pass with its price: full precision runs beside schemes, measured or not."""
    schemes = parse_schemes(one.schemes)
    first = one.full_precision or one.is_quantized
    first = first and not (one.draw or one.perturbed)
    full = 0 if one.is_quantized else 2 if one.perturbed else 1
    work = pricing.flops(schemes, items=first, full_precision=full)
    price = _reading(one.subject) + Price(work, 0, len(schemes) + full)
    return replace(one, price=price)


def _reading(subject: Subject) -> Price:
    return Price(nbytes_read=sum(checkpoint.nbytes for checkpoint, _ in subject.members))


def planned_class(scheme: Scheme, sizes: Sizes) -> str:
    return class_of_stored(scheme.bit_class, planned_bits(scheme, sizes))


def planned_bits(scheme: Scheme, sizes: Sizes) -> float | None:
    return scheme.planned_bits(sizes.matrices, sizes.blocks)


def class_notes(schemes: Sequence[Scheme], sizes: Sizes) -> Iterator[str]:
    for scheme in schemes:
        bits, name = planned_bits(scheme, sizes), planned_class(scheme, sizes)
        if bits is not None and name != scheme.bit_class:
            yield (
                f"`{scheme.short}` stores {bits:.2f} bits per weight of this model, and competes "
                f"in class {name}"
            )


def refuse_classes(recipe: Recipe, schemes: Sequence[Scheme], sizes: Sizes | None) -> None:
    """Refuse a class of bits that no scheme has; without sizes, unless shapes decide it."""
    if sizes is None and any(scheme.mixes_types for scheme in schemes):
        return
    classes = {planned_class(s, sizes) if sizes else s.bit_class for s in schemes}
    absent = [name for name in recipe.bits if name not in classes]
    if absent:
        name, measured = absent[0], ", ".join(s.short for s in schemes)
        what, example = f"class {name}", "`qaudit list schemes` has them"
        if name.isdecimal():
            what, example = f"{name} bits", f"for example `rtn-{name}bit`"
        raise UsageError(
            f"`--bits` asks for {what}, which no scheme here has: {measured}",
            hint="; ".join(
                [f"add one, {example}", *(class_notes(schemes, sizes) if sizes else ())]
            ),
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
