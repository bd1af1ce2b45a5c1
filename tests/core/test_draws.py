"""Several draws: what the width of an interval is made of, and that it holds what it should."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.trials import measured_twins, said_to_differ
from qaudit.core.draws import pooled
from qaudit.core.statistics import interval


def ratio(sums: np.ndarray) -> np.ndarray:
    return sums[0] / sums[1] - 1


def drawn(
    draws: int, documents: int, between: float, rng: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (quantized, full) sums: a damage of 3 %, moved by the draw and by each document."""
    full = np.exp(0.3 * rng.standard_normal(documents)) * 100
    own = 0.02 * rng.standard_normal(documents)
    found = []
    for _ in range(draws):
        damage = 0.03 + between * rng.standard_normal() + own
        found.append((full * (1 + damage + 0.01 * rng.standard_normal(documents)), full))
    return found


def test_one_draw_is_the_interval_over_documents() -> None:
    (only,) = drawn(1, 40, 0.01, np.random.default_rng(0))
    found = pooled([only], ratio)
    assert found.interval == interval(only, ratio)
    assert (found.draws, found.draw, found.share_of_documents) == (1, None, None)


@given(st.integers(2, 6), st.integers(0, 99))
def test_equal_draws_add_nothing(draws: int, seed: int) -> None:
    (only,) = drawn(1, 30, 0.0, np.random.default_rng(seed))
    found, alone = pooled([only] * draws, ratio), interval(only, ratio)
    assert found.draw == pytest.approx(0.0, abs=1e-12)
    assert found.interval.low == pytest.approx(alone.low, rel=1e-9)
    assert found.interval.high == pytest.approx(alone.high, rel=1e-9)
    assert found.share_of_documents == pytest.approx(1.0)


@given(st.integers(2, 5), st.integers(0, 99))
def test_the_order_of_draws_does_not_matter(draws: int, seed: int) -> None:
    found = drawn(draws, 25, 0.01, np.random.default_rng(seed))
    forward, backward = pooled(found, ratio), pooled(found[::-1], ratio)
    assert forward.interval.low == pytest.approx(backward.interval.low, rel=1e-9, abs=1e-12)
    assert forward.draw == pytest.approx(backward.draw, rel=1e-9)


def test_the_part_of_the_draw_is_the_scatter_between_draws() -> None:
    found = drawn(6, 50, 0.02, np.random.default_rng(1))
    each = [float(ratio(np.stack(d).sum(axis=1, keepdims=True))[0]) for d in found]
    assert pooled(found, ratio).draw == pytest.approx(np.std(each, ddof=1))


def test_two_draws_that_disagree_make_a_wide_interval() -> None:
    a, b = drawn(1, 200, 0.0, np.random.default_rng(2)) + drawn(
        1, 200, 0.0, np.random.default_rng(2)
    )
    worse = (a[0] * 1.02, a[1])
    found = pooled([worse, b], ratio)
    # Two draws 2 points apart: nearly all of the width, with one degree of freedom.
    half = stats.t.ppf(0.975, 1) * 0.0206 / 2
    assert found.interval.high - found.interval.estimate == pytest.approx(half, rel=0.1)
    assert found.share_of_documents is not None
    assert found.share_of_documents < 0.05


def test_a_sum_that_is_no_number_has_no_interval() -> None:
    quantized, full = drawn(1, 20, 0.0, np.random.default_rng(3))[0]
    found = pooled([(quantized * math.nan, full), (quantized, full)], ratio)
    assert not math.isfinite(found.interval.high)


@pytest.mark.parametrize(("draws", "between"), [(2, 0.0), (2, 0.02), (4, 0.005), (4, 0.02)])
def test_intervals_hold_the_expected_damage(draws: int, between: float) -> None:
    rng, held, trials = np.random.default_rng(draws), 0, 400
    for _ in range(trials):
        found = pooled(drawn(draws, 40, between, rng), ratio).interval
        held += found.low <= 0.03 <= found.high
    # 400 trials at 95 % hold 371 or more but once in a thousand; wider than promised is allowed.
    assert held >= 366


def test_measured_draws_of_one_model_are_not_said_to_differ() -> None:
    # 2.3 % in 5,000 trials; 400 trials at 5 % breach 34 times or more but once in a thousand.
    assert said_to_differ(measured_twins("gptq-3bit", 3), 101, trials=400, seed=0) < 34


def test_a_single_draw_of_each_errs_far_more_often() -> None:
    # The reason to repeat calibration: 30 % in 5,000 trials.
    assert said_to_differ(measured_twins("gptq-3bit", 1), 101, trials=400, seed=0) > 80
