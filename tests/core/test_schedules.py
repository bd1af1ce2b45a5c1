"""Schedules against published values, and against their formulas written out again.

The numbers of OLMo-2-1B and 7B are printed in the configurations of their second stage: an
independent check of formula, batch and units. The others follow from the formula and the
published inputs; they hold the transcription, not what the trainer logged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LinearLR,
    SequentialLR,
)

from experiments.run import spell
from qaudit.core.schedules import KINDS, Schedule, build

COSINE_2T = {"warmup": 8_388_608_000, "end": 5e12}  # OLMo 2, in tokens
OLMO2_1B = build("cosine", peak=4e-4, **COSINE_2T)
OLMO2_7B = build("cosine", peak=3e-4, **COSINE_2T)
OLMO2_32B = build("cosine", peak=6e-4, warmup=2000 * 8_388_608, end=6.5e12)
OLMO2_1B_STAGE2 = build("linear", peak=7.4487e-5, end=50e9)
OLMO2_7B_STAGE2 = build("linear", peak=6.1499e-5, end=50e9)
OLMO2_13B_STAGE2 = build("linear", peak=9e-5, end=300e9)
OLMO3_7B_PART1 = build("cosine", peak=3e-4, warmup=2000, end=5e12 / 4_194_304)
OLMO3_7B_PART2 = build("half_cosine", peak=3e-4, warmup=597_046, end=7e12 / 4_194_304)
OLMO1_1B = build("cosine", peak=4e-4, warmup=2000, warmup_min=4e-5, end=739_328)
SMOLLM3 = build("wsd", peak=2e-4, warmup=2000, decay_start=4_198_001, decay_length=522_000)
SMOLLM3_32K = build(
    "wsd", peak=2e-5, warmup=1000, decay_start=1000, decay_length=19_000, shape="cosine"
)
SMOLLM3_64K = build(
    "wsd", peak=2e-5, warmup=1000, decay_start=1000, decay_length=21_000, shape="cosine"
)
SMOLLM2 = build("wsd", peak=5e-4, warmup=2000, decay_start=4_716_000, decay_length=524_000)
PYTHIA_160M = build("neox_cosine", peak=6e-4, warmup=1430, end=143_000, floor=6e-5)
OPEN_SCI_1T = build("wsd", peak=4e-3, warmup=25_000, decay_start=193_764, decay_length=48_440)
OPEN_SCI_300B = build("wsd", peak=4e-3, warmup=25_000, decay_start=58_129, decay_length=14_532)
AMBER = build("cosine", peak=3e-4, warmup=2000, end=274_320)


def apertus(peak: float) -> Schedule:
    total, cooldown = 3_662_109_375, 403_905_806  # samples
    return build(
        "wsd", peak=peak, warmup=4_096_000, decay_start=total - cooldown,
        decay_length=cooldown, floor=0.1 * peak, shape="sqrt",
    )  # fmt: skip


def samples(step: int, small: int, switch: int) -> int:
    """Return the samples at a step of a run whose batch doubles after `switch` samples."""
    before = switch // small
    return step * small if step <= before else switch + (step - before) * 2 * small


def at_8b(step: int) -> int:
    return samples(step, 1024, 1_718_272_000)


def at_70b(step: int) -> int:
    return samples(step, 2048, 1_072_164_864)


PUBLISHED = [
    ("OLMo-2-1B at its end", OLMO2_1B, 1_907_359 * 2_097_152, 7.4487e-05),
    ("OLMo-2-7B at step 928000", OLMO2_7B, 928_000 * 4_194_304, 6.1499e-05),
]

COMPUTED = [
    ("OLMo-2-1B", OLMO2_1B, 1_907_359 * 2_097_152, 7.448729e-05),
    ("OLMo-2-7B", OLMO2_7B, 928_000 * 4_194_304, 6.149879e-05),
    ("OLMo-2-7B at its end", OLMO2_7B, 928_646 * 4_194_304, 6.135114e-05),
    ("OLMo-2-7B in its warm-up", OLMO2_7B, 1000 * 4_194_304, 1.5e-04),
    ("OLMo-2-7B early", OLMO2_7B, 100_000 * 4_194_304, 2.955077e-04),
    ("OLMo-2-32B", OLMO2_32B, 721_901 * 8_388_608, 6.623217e-05),
    ("OLMo-2-1B stage 2", OLMO2_1B_STAGE2, 12_000 * 2_097_152, 3.699647e-05),
    ("OLMo-2-7B stage 2", OLMO2_7B_STAGE2, 6000 * 4_194_304, 3.054554e-05),
    ("OLMo-2-13B ingredient 4", OLMO2_13B_STAGE2, 20_000 * 8_388_608, 3.966835e-05),
    ("Olmo-3-7B part 1 where it stops", OLMO3_7B_PART1, 597_046, 1.65e-04),
    ("Olmo-3-7B part 2 where it starts", OLMO3_7B_PART2, 597_046, 1.65e-04),
    ("Olmo-3-7B part 2", OLMO3_7B_PART2, 800_000, 1.254377e-04),
    ("Olmo-3-7B at its end", OLMO3_7B_PART2, 1_413_814, 3.932522e-05),
    ("OLMo-1B", OLMO1_1B, 369_000, 2.212762e-04),
    ("OLMo-1B at its end", OLMO1_1B, 738_020, 4.000280e-05),
    ("SmolLM3 as its decay begins", SMOLLM3, 4_200_000, 1.992341e-04),
    ("SmolLM3", SMOLLM3, 4_240_000, 1.839084e-04),
    ("SmolLM3 late", SMOLLM3, 4_480_000, 9.195441e-05),
    ("SmolLM3 4k to 32k", SMOLLM3_32K, 4000, 1.879474e-05),
    ("SmolLM3 4k to 32k later", SMOLLM3_32K, 12_000, 7.545145e-06),
    ("SmolLM3 32k to 64k", SMOLLM3_64K, 4000, 1.900969e-05),
    ("SmolLM3 32k to 64k late", SMOLLM3_64K, 20_000, 4.442719e-07),
    ("SmolLM2-1.7B", SMOLLM2, 4_750_000, 4.675573e-04),
    ("SmolLM2-1.7B later", SMOLLM2, 5_000_000, 2.290076e-04),
    ("SmolLM2-1.7B last", SMOLLM2, 5_125_000, 1.097328e-04),
    ("Apertus-8B held", apertus(1.1e-4), at_8b(50_000), 1.1e-4),
    ("Apertus-8B as its decay begins", apertus(1.1e-4), at_8b(2_429_920), 1.098802e-4),
    ("Apertus-8B", apertus(1.1e-4), at_8b(2_500_000), 5.098559e-5),
    ("Apertus-8B late", apertus(1.1e-4), at_8b(2_600_000), 1.806368e-5),
    ("Apertus-8B at its end", apertus(1.1e-4), at_8b(2_627_139), 1.10001e-5),
    ("Apertus-70B", apertus(1e-5), at_70b(1_057_219), 9.9891e-6),
    ("Apertus-70B later", apertus(1e-5), at_70b(1_100_000), 4.071994e-6),
    ("Apertus-70B late", apertus(1e-5), at_70b(1_150_000), 1.270039e-6),
    ("open-sci 1T held", OPEN_SCI_1T, 190_000, 4e-3),
    ("open-sci 1T", OPEN_SCI_1T, 218_000, 1.998679e-3),
    ("open-sci 1T late", OPEN_SCI_1T, 242_000, 1.684558e-5),
    ("open-sci 300B", OPEN_SCI_300B, 60_000, 3.484999e-3),
    ("open-sci 300B late", OPEN_SCI_300B, 72_000, 1.819433e-4),
    ("Amber 0", AMBER, 762, 1.143e-4),
    ("Amber 100", AMBER, 762 * 101, 2.525878e-4),
    ("Amber 200", AMBER, 762 * 201, 1.417521e-4),
    ("Amber 300", AMBER, 762 * 301, 4.775420e-5),
    ("Amber 358", AMBER, 762 * 359, 3.000522e-5),
    ("pythia-160m in its warm-up", PYTHIA_160M, 512, 2.148252e-4),
    ("pythia-160m", PYTHIA_160M, 10_000, 5.946985e-4),
    ("pythia-160m half way", PYTHIA_160M, 71_000, 3.127163e-4),
    ("pythia-160m at its end", PYTHIA_160M, 143_000, 6e-5),
]


def test_published_learning_rates_are_met_and_formulas_of_families_give_theirs() -> None:
    for name, schedule, n, expected in (*PUBLISHED, *COMPUTED):  # with five to seven digits
        assert schedule.at(n) == pytest.approx(expected, rel=1e-5), name


@given(n=st.floats(0, 2e6), kind=st.sampled_from(sorted(KINDS)))
def test_a_schedule_stays_between_zero_and_its_peak_and_is_spelled_as_it_is_built(
    n: float, kind: str
) -> None:
    schedule = _typical(kind)
    assert 0 <= schedule.at(n) <= schedule.peak * (1 + 1e-12)
    assert build(**spell(schedule)) == schedule


# ------------------------------------------------------------- held against torch's schedulers


def _by_torch(peak: float, steps: int, scheduler: Callable[..., Any], **settings: Any) -> list:
    """Return the learning rates that one of torch's schedulers sets, from its step 0 on."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=peak)
    scheduled = scheduler(optimizer, **settings)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduled.step()
    return rates


@pytest.mark.parametrize("multiplier", [1, 2, 3])
def test_warm_restarts_are_those_of_torch_but_where_a_cycle_ends(multiplier: int) -> None:
    # At the last step of a cycle torch has begun the next one already; here it has the floor.
    ours = build("sgdr", peak=1.0, period=7, multiplier=multiplier, floor_ratio=0.05)
    theirs = _by_torch(
        1.0, 100, CosineAnnealingWarmRestarts, T_0=7, T_mult=multiplier, eta_min=0.05
    )
    ends = set(itertools.accumulate(7 * multiplier**k for k in range(20)))
    for step in range(100):
        expected = 0.05 if step in ends else theirs[step]
        assert ours.at(step) == pytest.approx(expected, abs=1e-12)  # two orders of the same sum


def test_each_restart_is_as_much_lower_as_was_asked_for() -> None:
    schedule = build("sgdr", peak=1.0, warmup=5, period=10, peak_decay=0.5, floor_ratio=0.1)
    tops = [schedule.at(5 + 10 * k + 1e-9) for k in range(6)]
    assert tops == pytest.approx([1.0, 0.5, 0.25, 0.125, 0.1, 0.1], rel=1e-6)  # never below floor


def test_cosine_and_linear_are_those_of_torch() -> None:
    cosine = _by_torch(1.0, 51, CosineAnnealingLR, T_max=50, eta_min=0.1)
    linear = _by_torch(1.0, 51, LinearLR, start_factor=1.0, end_factor=0.2, total_iters=50)
    ours = build("cosine", peak=1.0, end=50), build("linear", peak=1.0, end=50, floor_ratio=0.2)
    assert [ours[0].at(step) for step in range(51)] == pytest.approx(cosine, rel=1e-9)
    assert [ours[1].at(step) for step in range(51)] == pytest.approx(linear, rel=1e-9)


def test_warm_up_stable_decay_is_torch_s_three_schedulers_in_a_row() -> None:
    def in_a_row(optimizer: torch.optim.Optimizer) -> SequentialLR:
        parts = [
            LinearLR(optimizer, start_factor=1e-9, end_factor=1.0, total_iters=10),
            ConstantLR(optimizer, factor=1.0),
            LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=20),
        ]
        return SequentialLR(optimizer, parts, milestones=[10, 50])

    ours = build("wsd", peak=1.0, warmup=10, decay_start=50, decay_length=20)
    theirs = _by_torch(1.0, 80, in_a_row)
    assert [ours.at(step) for step in range(80)] == pytest.approx(theirs, abs=1e-8)


# ------------------------------------------------------------------------- oscillatory lock-in


def test_a_bump_stands_in_the_first_share_of_each_period() -> None:
    schedule = build("oli", peak=1.0, end=400, period=50, amplitude=0.5, cool_share=0.6)
    assert schedule.at(510) == schedule.at(400) == pytest.approx(0.1)
    for step in range(0, 400, 7):
        base = 0.1 + 0.9 * (1 + math.cos(math.pi * step / 400)) / 2
        place = step % 50
        bump = math.sin(math.pi * place / 20) ** 2 if place < 20 else 0.0
        assert schedule.at(step) == pytest.approx(base + 0.5 * (1 - base) * bump, rel=1e-12)


def _typical(kind: str) -> Schedule:
    more = {
        "constant": {},
        "wsd": {"decay_start": 5e5, "decay_length": 5e5},
        "neox_cosine": {"end": 1e6, "floor": 1e-4},
        "sgdr": {"period": 1e5, "multiplier": 2, "peak_decay": 0.7, "floor_ratio": 0.1},
        "oli": {"end": 1e6, "period": 1e5},
    }
    return build(kind, peak=1e-3, warmup=1000, **more.get(kind, {"end": 1e6}))


@pytest.mark.parametrize(
    ("kind", "parameters", "words"),
    [
        ("cosin", {}, "unknown schedule `cosin`"),
        ("linear", {"peak": 1, "end": 2, "floor": 3}, "has no ['floor']"),
        ("linear", {"peak": 1}, "needs ['end']"),
        ("wsd", {"peak": 1, "decay_start": 1, "decay_length": 1, "shape": "s"}, "decay shape"),
        ("linear", {"peak": 1, "end": 0}, "`end` is 0, and it must be above the warm-up's 0"),
        ("cosine", {"peak": 1, "end": 5, "warmup": 5}, "`end` is 5, and it must be above"),
        ("wsd", {"peak": 1, "decay_start": 1, "decay_length": 0}, "`decay_length` is 0"),
        ("constant", {"peak": float("nan")}, "`peak` is `nan`, and it must be a number"),
        ("constant", {"peak": "high"}, "`peak` is `high`, and it must be a number"),
        ("constant", {"peak": 1, "warmup": [3]}, "`warmup` is `[3]`, and it must be a number"),
        ("sgdr", {"peak": 1, "period": 0}, "`period` is 0, and it must be above 0"),
        ("sgdr", {"peak": 1, "period": 1, "multiplier": 0.5}, "`multiplier` is 0.5"),
        ("sgdr", {"peak": 1, "period": 1, "peak_decay": 2}, "`peak_decay` is 2"),
        ("oli", {"peak": 1, "end": 9, "period": 3, "amplitude": 1.5}, "from 0 to 1"),
        ("oli", {"peak": 1, "end": 9, "period": 3, "cool_share": 1}, "`cool_share` is 1"),
    ],
)
def test_a_schedule_nobody_wrote_is_refused(kind: str, parameters: dict, words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        build(kind, **parameters)
    assert words in str(refusal.value)
