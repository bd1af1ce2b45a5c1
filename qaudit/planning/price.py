"""What goes through a model in an audit, its time as an order of magnitude, and what is kept.

No torch. Time is arithmetic over a rate that is measured in a moment. Progress, and the status of
parts, go by the pace of what was measured instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from glob import escape
from pathlib import Path

import numpy as np
import psutil

from qaudit.core.gram import SAMPLE
from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Calibration, Scheme
from qaudit.core.shipped import Shipped
from qaudit.core.whole_block import STEP_TOKENS
from qaudit.diagnostics.diagnostic import DiagnosticWork
from qaudit.diagnostics.registry import parse_diagnostics
from qaudit.errors import UsageError
from qaudit.planning.devices import gpu_name
from qaudit.planning.sizes import Sizes, TextSize
from qaudit.saved.results import slug_of
from qaudit.support.keys import first_of
from qaudit.support.sizes import size
from qaudit.types import Plan, Price, Protocol, Recipe, Subject

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
ROUND_TOKENS = 1_000_000  # of items of several tasks that go through blocks together
SPREAD = 4.0  # of a time before anything is measured
SERIAL = 1 / 20  # of the work of one core, which other cores do not share
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


@dataclass(frozen=True)
class Load:
    """What goes through a model side by side."""

    schemes: tuple[Scheme, ...]
    text: TextSize
    streams: int  # models that are evaluated

    @classmethod
    def of(cls, schemes: Sequence[Scheme], text: TextSize, full_precision: int = 1) -> Load:
        return cls(tuple(schemes), text, len(schemes) + full_precision)

    @property
    def with_streams(self) -> int:
        """How many schemes calibrate on what they made of earlier linears."""
        return sum(scheme.calibration.has_stream for scheme in self.schemes)

    @property
    def calibrated(self) -> int:
        """How many streams the calibration text goes through."""
        shared = any(scheme.calibration.reads_full_precision for scheme in self.schemes)
        return self.with_streams + shared

    @property
    def learns(self) -> bool:
        return any(scheme.calibration is Calibration.WHOLE_BLOCK for scheme in self.schemes)

    @property
    def step_tokens(self) -> int:
        """Tokens of a mini-batch that is learned on."""
        return min(max(STEP_TOKENS, self.text.context), self.text.calibration_tokens)

    @property
    def round_tokens(self) -> int:
        """Tokens that are evaluated together."""
        return self.text.evaluation_tokens + self.item_round_tokens

    @property
    def item_round_tokens(self) -> int:
        """Tokens of items that are evaluated together: rounds of whole tasks."""
        return max(self.text.largest_task_tokens, min(self.text.item_tokens, ROUND_TOKENS))


# ---------------------------------------------------------------------------------------- time


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
    inner = sizes.expert_inner
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


def price_of(work: DiagnosticWork, load: Load, sizes: Sizes) -> Price:
    return Price(work.passes * flops(sizes, load), streams=work.passes * work.streams)


def with_needed_again(plan: Plan, evidence: Path) -> Plan:
    """Return the plan with a note where measured subjects must be read again to be diagnosed.

    Only file names are checked: a result for other weights under the same label counts.
    """
    requested = parse_diagnostics(plan.recipe.diagnostics)
    names = [diagnostic.name for diagnostic in requested if diagnostic.reads_weights]
    if not names or not evidence.is_dir():
        return plan
    again = [s.label for s in plan.subjects if _needed_again(s, names, evidence)]
    if not again:
        return plan
    shown = first_of(again)
    note = f"{shown}: measured already, and their weights are needed again to diagnose them"
    return replace(plan, notes=(*plan.notes, note))


def _needed_again(subject: Subject, names: Sequence[str], evidence: Path) -> bool:
    measured = any(evidence.glob(f"{_glob(subject.label)}--*.npz"))
    folder = evidence / "diagnostics"
    return measured and not all(
        any(folder.glob(f"{_glob(subject.label)}--{name}--*.json")) for name in names
    )


def _glob(label: str) -> str:
    return escape(slug_of(label))


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
    """Return the most bytes on the disk before it is known what ships; searches keep nothing."""
    if not specs:
        return 0
    linears = int(_PER_WEIGHT * sizes.blocks * sizes.block_parameters)
    rest = _LARGEST_ITEM * sizes.rest_parameters
    contents = {subject.content for subject in subjects if not subject.is_search}
    return len(contents) * (len(specs) * linears + rest)


def keeping_notes(specs: Sequence[str], nbytes: int) -> tuple[str, ...]:
    if not specs:
        return ()
    return (
        f"`--keep` writes up to {size(nbytes)} of quantized weights beside downloads; those that "
        "ship stay, the others are removed with the verdict",
    )


def begins_again_notes(rounds: int, diagnoses: Iterable[DiagnosticWork]) -> tuple[str, ...]:
    """Note why a subject that is interrupted does not go on at a block."""
    reasons = [f"the items of tasks go through in about {rounds} rounds"] * (rounds > 1)
    reasons += ["`--diagnose weights` reads what is quantized"] * any(w.watches for w in diagnoses)
    if not reasons:
        return ()
    return (f"a subject that is interrupted begins again, because {' and '.join(reasons)}",)
