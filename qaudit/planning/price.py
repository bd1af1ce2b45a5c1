"""What goes through a model in an audit, its time as an order of magnitude, and what is kept.

No torch. Time is arithmetic over a rate that is measured in a moment. Progress, and the status of
parts, go by the pace of what was measured instead.
"""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from qaudit.core.column_loops import PLAIN, choose
from qaudit.core.gram import SAMPLE
from qaudit.core.linears import STEP_TOKENS
from qaudit.core.mixture import FITTED, SCORED
from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Calibration, Scheme, Shipped
from qaudit.core.statistics import detectable, excess
from qaudit.diagnostics.diagnostic import DiagnosticWork
from qaudit.diagnostics.registry import parse_diagnostics
from qaudit.errors import UsageError
from qaudit.host import has_bf16_units
from qaudit.planning.sizes import Sizes, TextSize
from qaudit.support.lazy import torch
from qaudit.types import FULL_PRECISION, Measurement, Plan, Price, Protocol, Recipe, Subject

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
ROUND_TOKENS = 1_000_000  # of items of several tasks that go through blocks together
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
    def mixes_bits(self) -> bool:
        return any(scheme.mixes_bits for scheme in self.schemes)

    @property
    def choosing_tokens(self) -> int:
        """Tokens that the bits of mixtures are chosen on."""
        return min(FITTED + SCORED, self.text.calibration_tokens)

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


def price_of(work: DiagnosticWork, load: Load, sizes: Sizes) -> Price:
    return Price(work.passes * flops(sizes, load), streams=work.passes * work.streams)


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


DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "fast", "float32", "bfloat16", "float16")
_NODES = ("/dev/nvidiactl", "/dev/dxg")  # of the driver on Linux, and in WSL2
_NO_MPS = "MPS has no float64, in which divergences and moments are summed"


def choose_device(device: str, dtype: str) -> tuple[str, str]:
    if device.partition(":")[0] not in DEVICES:
        raise UsageError(f"there is no device `{device}`", hint=f"one of {', '.join(DEVICES)}")
    if dtype not in DTYPES:
        raise UsageError(f"there is no dtype `{dtype}`", hint=f"one of {', '.join(DTYPES)}")
    if device == "auto":
        device = why_auto()[0]
    if dtype in ("auto", "fast"):
        on_gpu = device.startswith("cuda")
        if not on_gpu:
            has_units = dtype == "fast" and has_bf16_units()
        elif _has_driver() and torch.cuda.is_available():
            has_units = torch.cuda.is_bf16_supported(including_emulation=False)
        else:  # a plan for a GPU of another machine
            has_units = True
        dtype = "bfloat16" if has_units else "float32"
    return device, dtype


def choose_audited(device: str, dtype: str) -> tuple[str, str]:
    """Return the device and dtype of an audit; refuse a device that cannot run one."""
    if device == "mps":
        raise UsageError(f"an audit cannot run on `mps`: {_NO_MPS}", hint="use `--device cpu`")
    return choose_device(device, dtype)


def why_auto() -> tuple[str, str]:
    build = _torch_build()
    if build.startswith("rocm"):
        reason = "ROCm is not tested, and is used only where `--device cuda` asks for it"
    elif build.startswith("xpu"):
        reason = "XPU is not supported"
    elif sys.platform == "darwin":
        reason = _NO_MPS if platform.machine() == "arm64" else "there is no CUDA device"
    elif not _has_driver():
        reason = f"no CUDA driver: there is neither {' nor '.join(_NODES)}"
    elif torch.cuda.is_available():
        return "cuda", "this torch sees a CUDA device"
    else:
        reason = "there is a CUDA driver, and this torch sees no device"
    return "cpu", reason


def device_notes(device: str) -> tuple[str, ...]:
    """Return why `auto` leaves an accelerator unused, where there is one."""
    if device != "auto":
        return ()
    chosen, reason = why_auto()
    is_unused = chosen == "cpu" and not reason.startswith(("no CUDA", "there is no"))
    return (f"computed on the CPU: {reason}",) if is_unused else ()


def choose_column_loop(device: str, schemes: Sequence[Scheme], sizes: Sizes) -> tuple[str, str]:
    """Return how GPTQ's columns are rounded, and a note; on a GPU what is proven there."""
    if not device.startswith("cuda") or not any(scheme.rounds_columns for scheme in schemes):
        return PLAIN, ""
    if not torch.cuda.is_available():
        return (
            PLAIN,
            "GPTQ's columns are rounded by the plain loop: the plan was made without a GPU",
        )
    widths = {columns for _, columns in sizes.matrices.values()} or {sizes.hidden, sizes.widest}
    return choose(widths, torch.device(device))


@cache
def gpu_name() -> str | None:
    if not _has_driver():
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _torch_build() -> str:
    """Return the suffix of the version of torch: cu128, rocm6.4, xpu, cpu or nothing."""
    try:
        return version("torch").partition("+")[2]
    except PackageNotFoundError:
        return ""


def _has_driver() -> bool:
    return any(Path(node).exists() for node in _NODES)


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
