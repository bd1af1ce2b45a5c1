"""Several draws: what the width of an interval is made of, and that it holds what it should."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.trials import WORSE, measured_twins, said_to_differ, simulated
from benchmarks.trials import difference as difference_of_relative_errors
from qaudit.core.draws import detectable, documents_to_detect, pooled
from qaudit.core.statistics import interval

Draws = list[tuple[np.ndarray, ...]]


def ratio(sums: np.ndarray) -> np.ndarray:
    return sums[0] / sums[1] - 1


def drawn(
    draws: int, documents: int, between: float, rng: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (quantized, full) sums: a damage of 3 %, moved by the draw and by each document."""
    full = np.exp(0.3 * rng.standard_normal(documents)) * 100
    own = 0.02 * rng.standard_normal(documents)
    sums = []
    for _ in range(draws):
        damage = 0.03 + between * rng.standard_normal() + own
        sums.append((full * (1 + damage + 0.01 * rng.standard_normal(documents)), full))
    return sums


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


# ------------------------------- the documents that a pilot names find what they should


def difference(sums: np.ndarray) -> np.ndarray:
    return sums[0] / sums[1] - sums[2] / sums[3]


def pair(
    rng: np.random.Generator, documents: int, draws: int, worse: float, of_draw: float
) -> Draws:
    full = 100 * np.exp(0.2 * rng.standard_normal(documents))
    own = 0.02 + 0.01 * rng.standard_normal(documents)

    def quantized(extra: float) -> np.ndarray:
        drawn = of_draw * rng.standard_normal()
        return full * (1 + own + drawn + extra + 0.03 * rng.standard_normal(documents))

    return [(quantized(worse), full, quantized(0), full) for _ in range(draws)]


def found_with(named: int, draws: int, effect: float, of_draw: float, trials: int) -> float:
    rng = np.random.default_rng(named)
    hits = sum(
        pooled(pair(rng, named, draws, effect, of_draw), difference).interval.low > 0
        for _ in range(trials)
    )
    return hits / trials


def test_as_many_documents_as_named_find_it_in_four_of_five_cases() -> None:
    rng, effect = np.random.default_rng(0), 0.01
    named = documents_to_detect(pair(rng, 400, 1, 0.0, 0.0), difference, effect)
    assert named is not None
    # The pilot knows the spread of documents to 4 %, which moves the power by two points; 300
    # trials have an error of 2.3.
    assert found_with(named, 1, effect, 0.0, 300) == pytest.approx(0.8, abs=0.09)


def test_pilots_hold_what_they_promise_where_few_documents_carry_the_sum() -> None:
    # Each trial with a pilot of its own. By the pilots' estimates themselves instead of their
    # upper bounds it is 71 %; 600 trials have an error of 1.6 points.
    rng, hits = np.random.default_rng(2), 0
    for _ in range(600):
        pilot = simulated(rng, 100, 1, WORSE, 0.0)
        named = documents_to_detect(pilot, difference_of_relative_errors, WORSE)
        assert named is not None
        fresh = simulated(rng, named, 1, WORSE, 0.0)
        hits += pooled(fresh, difference_of_relative_errors).interval.low > 0
    assert 0.78 <= hits / 600 <= 0.9


def test_a_pilot_of_several_draws_holds_what_it_promises() -> None:
    rng, effect, powers = np.random.default_rng(1), 0.01, []
    for _ in range(12):
        named = documents_to_detect(pair(rng, 100, 10, 0.0, 0.0005), difference, effect)
        assert named is not None
        powers.append(found_with(named, 10, effect, 0.0005, 60))
    # 720 trials have an error of 1.5 points; the pilots' luck adds some.
    assert np.mean(powers) >= 0.76


def test_half_the_effect_takes_four_times_the_documents() -> None:
    pilot = pair(np.random.default_rng(1), 100, 1, 0.0, 0.0)
    large, small = (documents_to_detect(pilot, difference, e) for e in (0.004, 0.002))
    assert large is not None
    assert small is not None
    assert small / large == pytest.approx(4, rel=0.05)


def test_what_is_detectable_with_these_documents_needs_just_these_documents() -> None:
    pilot = pair(np.random.default_rng(2), 80, 3, 0.0, 0.001)
    effect = detectable(pilot, difference)
    named = documents_to_detect(pilot, difference, effect)
    assert named is not None
    assert 79 <= named <= 80  # the effect is found in steps of a thousandth of the error


def test_where_draws_scatter_more_than_the_effect_no_documents_will_do() -> None:
    pilot = pair(np.random.default_rng(3), 60, 3, 0.0, 0.05)
    assert documents_to_detect(pilot, difference, 0.001) is None


def test_no_effect_is_never_found() -> None:
    pilot = pair(np.random.default_rng(4), 60, 1, 0.0, 0.0)
    assert documents_to_detect(pilot, difference, 0.0) is None
