"""Schedules against torch's and their formulas; published values are in `tests/families`."""

import itertools
import math

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
from qaudit.core.schedules import KINDS, build


@given(n=st.floats(0, 2e6), kind=st.sampled_from(sorted(KINDS)))
def test_a_schedule_stays_between_zero_and_its_peak_and_is_spelled_as_it_is_built(n, kind):
    schedule = _typical(kind)
    assert 0 <= schedule.at(n) <= schedule.peak * (1 + 1e-12)
    assert build(**spell(schedule)) == schedule


# ------------------------------------------------------------- held against torch's schedulers


def _by_torch(peak, steps, scheduler, **settings):
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
def test_warm_restarts_are_those_of_torch_but_where_a_cycle_ends(multiplier):
    # At the last step of a cycle torch has begun the next one already; here it has the floor.
    ours = build("sgdr", peak=1.0, period=7, multiplier=multiplier, floor_ratio=0.05)
    cycles = {"T_0": 7, "T_mult": multiplier, "eta_min": 0.05}
    theirs = _by_torch(1.0, 100, CosineAnnealingWarmRestarts, **cycles)
    ends = set(itertools.accumulate(7 * multiplier**k for k in range(20)))
    for step in range(100):
        expected = 0.05 if step in ends else theirs[step]
        assert ours.at(step) == pytest.approx(expected, abs=1e-12)  # two orders of the same sum


def test_cosine_and_linear_are_those_of_torch_and_each_restart_is_as_much_lower_as_asked():
    schedule = build("sgdr", peak=1.0, warmup=5, period=10, peak_decay=0.5, floor_ratio=0.1)
    tops = [schedule.at(5 + 10 * k + 1e-9) for k in range(6)]
    assert tops == pytest.approx([1.0, 0.5, 0.25, 0.125, 0.1, 0.1], rel=1e-6)  # never below floor
    cosine = _by_torch(1.0, 51, CosineAnnealingLR, T_max=50, eta_min=0.1)
    linear = _by_torch(1.0, 51, LinearLR, start_factor=1.0, end_factor=0.2, total_iters=50)
    ours = build("cosine", peak=1.0, end=50), build("linear", peak=1.0, end=50, floor_ratio=0.2)
    assert [ours[0].at(step) for step in range(51)] == pytest.approx(cosine, rel=1e-9)
    assert [ours[1].at(step) for step in range(51)] == pytest.approx(linear, rel=1e-9)


def test_warm_up_stable_decay_is_torch_s_three_schedulers_in_a_row():
    def in_a_row(optimizer):
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


def test_a_bump_stands_in_the_first_share_of_each_period():
    schedule = build("oli", peak=1.0, end=400, period=50, amplitude=0.5, cool_share=0.6)
    assert schedule.at(510) == schedule.at(400) == pytest.approx(0.1)
    for step in range(0, 400, 7):
        base = 0.1 + 0.9 * (1 + math.cos(math.pi * step / 400)) / 2
        place = step % 50
        bump = math.sin(math.pi * place / 20) ** 2 if place < 20 else 0.0
        assert schedule.at(step) == pytest.approx(base + 0.5 * (1 - base) * bump, rel=1e-12)


def _typical(kind):
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
def test_a_schedule_nobody_wrote_is_refused(kind, parameters, words):
    with pytest.raises(ValueError) as refusal:
        build(kind, **parameters)
    assert words in str(refusal.value)
