"""Paired accuracy against statsmodels' and scipy's formulas, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from qaudit.core import items
from qaudit.core.items import Marked
from qaudit.core.statistics import items_to_detect
from qaudit.types import Interval


def pair(both: int, lost: int, won: int, neither: int) -> Marked:
    cells = [(1, 1)] * both + [(0, 1)] * lost + [(1, 0)] * won + [(0, 0)] * neither
    right, full = np.array(cells, dtype=np.bool_).reshape(-1, 2).T
    return Marked(right, full)


CELLS = st.tuples(*(st.integers(0, 60),) * 4).filter(lambda cells: sum(cells) > 5)


def drop_of(right: npt.ArrayLike, full: npt.ArrayLike) -> Interval | None:
    one = Marked(np.array(right, dtype=np.bool_), np.array(full, dtype=np.bool_))
    return items.drop([one], 0.95, normalized=True)


def test_a_normalized_drop_is_a_share_of_what_was_wrong() -> None:
    found = drop_of([1, 1, 0, 0, 0], [1, 1, 1, 0, 0])
    assert found is not None
    assert found.estimate == pytest.approx((0.6 - 0.4) / (1 - 0.6))


def test_no_flip_among_few_items_is_no_certainty() -> None:
    found = drop_of([1, 1, 0, 0] * 5, [1, 1, 0, 0] * 5)
    assert found is not None
    assert found.low < 0 < found.high


def test_a_model_that_is_never_wrong_has_no_normalized_drop() -> None:
    assert drop_of([1, 0], [1, 1]) is None


@pytest.mark.parametrize("count", [40, 200])
def test_intervals_of_the_drop_cover_the_truth(count: int) -> None:
    # 2,000 simulations, 3.5 standard errors (1.7 points) below 93 %.
    draw, held = np.random.default_rng(5), 0
    for _ in range(2000):
        full = draw.random(count) < 0.6
        found = drop_of(np.where(full, draw.random(count) < 0.93, draw.random(count) < 0.05), full)
        assert found is not None
        held += found.low <= (0.6 * 0.07 - 0.4 * 0.05) / 0.4 <= found.high
    assert held / 2000 > 0.93 - 0.017


@given(CELLS)
def test_a_drop_in_points_is_the_interval_of_agresti_and_min(
    cells: tuple[int, int, int, int],
) -> None:
    _, lost, won, _ = cells
    count = sum(cells)
    found = items.drop([pair(*cells)], 0.95, normalized=False)
    assert found is not None
    b, c, n = lost + 0.5, won + 0.5, count + 2
    error = math.sqrt(b + c - (b - c) ** 2 / n) / n
    half = stats.t.ppf(0.975, count + 1) * error
    center = (b - c) / n
    assert found.estimate == pytest.approx((lost - won) / count)
    assert found.low == pytest.approx(min(found.estimate, center - half), abs=1e-9)
    assert found.high == pytest.approx(max(found.estimate, center + half), abs=1e-9)


@given(st.integers(0, 80), st.integers(0, 80))
def test_mcnemar_is_the_exact_test_less_half_of_what_equals_the_observation(b: int, c: int) -> None:
    found = items.mcnemar(b, c)
    if b + c == 0:
        assert found == 1.0
        return
    exact = stats.binomtest(min(b, c), b + c, 0.5).pvalue
    equal = stats.binom.pmf(min(b, c), b + c, 0.5)  # half of it in each of two tails
    assert found == pytest.approx(1.0 if b == c else exact - equal, abs=1e-12)


def test_mid_p_rejects_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    rejected = [
        items.mcnemar(int(b), int(60 - b)) < 0.05 for b in random.binomial(60, 0.5, size=4000)
    ]
    # 4,000 draws: a standard error of 0.34 points; mid-p is between 4.4 and 5.8 % here.
    assert 0.035 < np.mean(rejected) < 0.065


def test_the_interval_of_a_mean_over_tasks_holds_the_truth() -> None:
    random = np.random.default_rng(1)
    truths, held = [0.02, 0.05, 0.0], 0
    for _ in range(400):
        tasks = []
        for truth, count in zip(truths, (120, 300, 80), strict=True):
            full = random.random(count) < 0.6
            flip = random.random(count)
            right = np.where(full, flip > 0.06 + truth / 0.6, flip < 0.09)
            tasks.append(Marked(right, full))
        found = items.drop(tasks, 0.95, normalized=False)
        assert found is not None
        expected = np.mean([0.6 * (0.06 + truth / 0.6) - 0.4 * 0.09 for truth in truths])
        held += found.low <= expected <= found.high
    # 400 draws: a standard error of 1.1 points.
    assert 0.92 < held / 400 < 0.98


def test_items_that_decide() -> None:
    interval = Interval(0.02, -0.01, 0.05)
    needed = items_to_detect(interval, 400, 0.0)
    assert needed is not None
    # 1.96 + 0.84 standard errors of 0.0153 * sqrt(400 / n) are 0.02
    assert needed == pytest.approx(400 * (0.03 / 1.959964 * 2.801585 / 0.02) ** 2, abs=1)
    assert items_to_detect(interval, 400, 0.02) is None


def test_a_margin_factor_is_a_median_and_its_interval_that_of_order_statistics() -> None:
    ratios = np.arange(1.0, 22.0)
    found = items.margin_factor(ratios, 0.95)
    assert found is not None
    assert (found.estimate, found.low, found.high) == (11.0, 6.0, 16.0)  # ranks 6 and 16 of 21
    inside = stats.binom.cdf(15, 21, 0.5) - stats.binom.cdf(5, 21, 0.5)
    assert inside >= 0.95
    assert items.margin_factor(ratios[:5], 0.95) is None


def test_flips_count_both_ways_and_a_mean_weighs_tasks_alike() -> None:
    found = items.flips([pair(80, 10, 10, 0), pair(10, 0, 0, 0)], 0.95)
    assert found.estimate == pytest.approx(0.1)
    assert items.flips([pair(80, 10, 10, 0)], 0.95).estimate == pytest.approx(0.2)
