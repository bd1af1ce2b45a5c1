"""The passes of a plan, what each costs, and when they are due. No torch.

A pass sends one subject once through its blocks. Each subject has one; every further draw of
calibration text is another pass of what calibrates. A greedy soup is one entry: its passes are
chosen while it runs, and it is priced at their upper bound. Searches come behind their candidates.
Then it is known what ships. That one pair is rounded otherwise, which shows what arithmetic moves.

Time is arithmetic over a rate that is measured in a moment: an order of magnitude. Progress, and
the status of parts, go by the pace of what was measured instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

import numpy as np
import psutil

from qaudit.core.linears import SAMPLE
from qaudit.core.registry import parse_scheme, parse_schemes
from qaudit.core.scheme import Calibration, Scheme, Shipped
from qaudit.core.statistics import detectable, excess
from qaudit.diagnostics.diagnostic import DiagnosticWork, parse_diagnostics
from qaudit.errors import UsageError
from qaudit.host import has_bf16_units, has_gpu_driver
from qaudit.planning.sizes import Load, Sizes, TextSize
from qaudit.settings import SEARCHED_AT
from qaudit.support.lazy import torch
from qaudit.types import (
    FULL_PRECISION,
    GREEDY,
    AuditRecord,
    Checkpoint,
    Further,
    Measurement,
    Pass,
    Plan,
    Price,
    Protocol,
    Recipe,
    Subject,
)

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
SPREAD = 4.0  # of a time before anything is measured
START_SECONDS = (3.0, 20.0)  # to load libraries, to cut text and to write the report
SERIAL = 1 / 20  # of the work of one core, which other cores do not share
WITHOUT_UNITS = 2.5  # times as slow are 16 bits without instructions for them: 2.5 to 6 measured
GPU_TERAFLOPS = (  # of dense products in 16 bits and in float32, by what a name holds
    ("B200", 2250, 80), ("H200", 989, 67), ("H100", 989, 67), ("A100", 312, 19.5),
    ("L40S", 362, 91.6), ("L40", 181, 90.5), ("L4", 121, 30.3), ("A10", 125, 31.2),
    ("5090", 210, 105), ("4090", 165, 82.6), ("3090", 71, 35.6), ("V100", 125, 15.7),
    ("T4", 65, 8.1),
)  # fmt: skip
"""As their makers publish them. An audit is priced at half."""
OTHER_GPU = (200, 40)
BETWEEN = 300.0
"""Operations that take as long as what is done with a number between products of matrices.

A number is an activation that a linear reads (norms, gates, residuals), a logit, or a weight under
one candidate of its scale. Single steps took 150 to 450 on a processor with AVX-512: half of the
time of a model with hidden size 64, nothing beside the products of one with 7 B parameters.
"""


def flops(sizes: Sizes, load: Load) -> float:
    """Estimate the arithmetic of one subject."""
    text, calibration_tokens = load.text, load.text.calibration_tokens
    read = sizes.blocks * (3 * sizes.hidden + sizes.widest)  # activations of a token
    weights = sizes.blocks * sizes.block_parameters
    active = sizes.blocks * sizes.active_parameters
    forward = 2.0 * active + 4.0 * sizes.blocks * text.context * sizes.hidden + BETWEEN * read
    gram = 9 / 8 * sizes.blocks * _gram_products(sizes)
    evaluating = load.streams * (
        (text.evaluation_tokens + text.item_tokens) * forward
        + text.evaluation_tokens * sizes.vocabulary * (2.0 * sizes.hidden + BETWEEN)
    )
    work = evaluating + load.calibrated * calibration_tokens * (forward + gram)
    if load.mixes_bits:
        # Forwards once, and again for moments and for gradients, which take two.
        work += load.choosing_tokens * (5 * forward + gram)
    for scheme in load.schemes:
        if scheme.experts_see_all:
            work += calibration_tokens * 2.0 * (weights - active)
        # 20 candidates of scales; statistics, and the error before and behind.
        again = 20 * scheme.compares_modules + 3 * (scheme.calibration is Calibration.WHOLE_BLOCK)
        work += again * calibration_tokens * forward
        work += 3 * scheme.learning_steps * load.step_tokens * forward  # gradients take two
        work += BETWEEN * scheme.trials * weights
        work += scheme.sampled_operations * min(2 * SAMPLE, calibration_tokens) * read
    return work


def _gram_products(sizes: Sizes) -> float:
    """Return the products of a token with itself that Gram matrices of a block sum.

    Those of experts are made one by one: of what a token's own experts read, which goes through
    the first two linears of each once more.
    """
    if not sizes.experts:
        return 3.0 * sizes.hidden**2 + sizes.widest**2
    # Columns of an expert's last linear, as if it had three that are alike.
    inner = sizes.expert_parameters // (3 * sizes.hidden * sizes.experts)
    of_expert = sizes.hidden**2 + inner**2 + 4 * sizes.hidden * inner
    return 2.0 * sizes.hidden**2 + sizes.per_token * of_expert


@cache
def matmul_rate() -> float:
    """Measure one core's float32 matrix rate in FLOP per second, in a twentieth of a second.

    The product is small enough that no library shares it between threads, and the best of many
    counts: the others had to share the core.
    """
    side = 64
    a = np.random.default_rng(0).standard_normal((side, side), dtype=np.float32)
    began, best = time.perf_counter(), float("inf")
    while (now := time.perf_counter()) - began < 0.05:
        a @ a
        best = min(best, time.perf_counter() - now)
    return 2.0 * side**3 / best


def gpu_rate(name: str | None, dtype: str) -> float:
    """Return what to expect of a GPU in FLOP per second."""
    words = (name or "").replace("-", " ").split()
    rates = (rates for part, *rates in GPU_TERAFLOPS if part in words)
    half, single = next(rates, OTHER_GPU)
    return 0.5e12 * (half if ITEMSIZE[dtype] == 2 else single)


def seconds_range(work: float, device: str, dtype: str) -> tuple[float, float]:
    """Return the order of magnitude of the time that so many FLOP take: two ends, four apart.

    A processor is priced by its own rate and Amdahl's law, a GPU by its name: nothing of it is
    measured before. Small models spend most of their time between products of matrices.
    """
    if device.startswith("cuda"):
        rate = gpu_rate(gpu_name(), dtype)
    else:
        rate = matmul_rate() / (SERIAL + (1 - SERIAL) / (psutil.cpu_count() or 1))
        has_units = dtype == "bfloat16" and has_bf16_units()
        rate /= WITHOUT_UNITS if ITEMSIZE[dtype] == 2 and not has_units else 1
    return work / rate, SPREAD * work / rate


def diagnoses_of(
    recipe: Recipe, schemes: Sequence[Scheme], blocks: int, text: TextSize, protocol: Protocol
) -> dict[DiagnosticWork, Load]:
    """Return the work of each diagnostic, and what goes through a model for it at once."""
    diagnoses: dict[DiagnosticWork, Load] = {}
    for diagnostic in parse_diagnostics(recipe.diagnostics):
        work, documents = diagnostic.work(schemes, blocks), protocol.evaluation_documents
        share = min(1.0, (work.documents or documents) / documents)
        read = replace(text, evaluation_tokens=int(share * text.evaluation_tokens), item_tokens=0)
        diagnoses[work] = Load(work.schemes, read, max(1, work.streams))
    return diagnoses


_PER_WEIGHT = 1.25  # a byte for a code; scales and zero points of groups of 16 take a quarter more
_LARGEST_ITEM = 4


def kept_specs(keep: Sequence[str], schemes: Sequence[Scheme]) -> tuple[str, ...]:
    measured = {s.spec: s.short for s in schemes if not isinstance(s, Shipped)}
    wanted = parse_schemes(keep) if keep else ()
    for scheme in wanted:
        if scheme.spec not in measured:
            raise UsageError(
                f"`--keep {scheme.short}` names a scheme that is not measured",
                hint=f"measured are {', '.join(measured.values())}",
            )
    return tuple(scheme.spec for scheme in wanted)


def nbytes_to_keep(specs: Sequence[str], subjects: Sequence[Subject], sizes: Sizes) -> int:
    """Return the most bytes that are kept; searches keep nothing."""
    if not specs:
        return 0
    linears = int(_PER_WEIGHT * sizes.blocks * sizes.block_parameters)
    rest = _LARGEST_ITEM * sizes.rest_parameters
    contents = {subject.content for subject in subjects if not subject.is_search}
    return len(contents) * (len(specs) * linears + rest)


def begins_again_notes(rounds: int, diagnoses: Iterable[DiagnosticWork]) -> tuple[str, ...]:
    """Note why a subject that is interrupted does not go on at a block."""
    reasons = [f"the items of tasks go through in about {rounds} rounds"] * (rounds > 1)
    reasons += ["`--set diagnostics=weights` reads what is quantized"] * any(
        w.watches for w in diagnoses
    )
    if not reasons:
        return ()
    return (f"a subject that is interrupted begins again, because {' and '.join(reasons)}",)


@cache
def gpu_name() -> str | None:
    if not has_gpu_driver():
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def detectable_error(plan: Plan, measurements: Sequence[Measurement]) -> float | None:
    """Return the relative error that a typical comparison of the audit detects."""
    labels, effects = {subject.label for subject in plan.subjects}, []
    full = {
        (m.subject, m.evidence.document_sha256): m for m in measurements if m.spec == FULL_PRECISION
    }
    for m in measurements:
        documents = m.evidence.document_sha256
        beside = full.get((m.subject, documents))
        few = len(documents) <= plan.recipe.evaluation_documents
        if m.subject not in labels or m.spec not in plan.specs or beside is None or not few:
            continue
        scored = m.evidence.tokens > 0
        pair = (m.evidence.nll_sum[scored], beside.evidence.nll_sum[scored])
        effect = detectable(pair, excess, plan.recipe.confidence)
        if math.isfinite(effect):
            effects.append(effect)
    return median(effects) if effects else None


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
        first = priced(Pass(subject, tuple(s.spec for s in schemes)), pricing)
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
            draw = priced(
                Pass(subject, tuple(s.spec for s in drawn), full_precision=False, draw=1), pricing
            )
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


def with_shipped(subject: Subject, shipped: Sequence[Checkpoint]) -> Subject:
    if not shipped:
        return subject
    members = {(member.ref, member.files) for member, _ in subject.members}
    further = (c for c in dict.fromkeys(shipped) if (c.ref, c.files) not in members)
    return replace(subject, members=(*subject.members, *((c, 0.0) for c in further)))


def reading_shipped(step: Pass, shipped: Sequence[Checkpoint], pricing: Pricing) -> Pass:
    """Return a pass with the files that its schemes name, and their bytes in its price."""
    named = tuple(
        file for file in shipped if any(f":file={file.label}:" in spec for spec in step.schemes)
    )
    if not named:
        return step
    step = replace(step, shipped=named)
    if step.is_quantized:  # nothing runs beside it
        step = priced(replace(step, full_precision=False), pricing)
    nbytes = step.price.nbytes_read + sum(file.nbytes for file in named)
    return replace(step, price=replace(step.price, nbytes_read=nbytes))


def planned_class(scheme: Scheme, sizes: Sizes) -> str:
    return scheme.class_at(planned_bits(scheme, sizes))


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
