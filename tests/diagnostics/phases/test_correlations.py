"""Correlations of ranks against scipy's, and intervals that know how few points there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from qaudit.diagnostics.phases.judge import correlations

NUMBERS = st.lists(st.integers(-5, 5), min_size=5, max_size=12)


@given(NUMBERS, st.randoms(use_true_random=False))
def test_ranks_correlate_as_scipy_says(values: list[int], random: object) -> None:
    other = list(values)
    random.shuffle(other)  # type: ignore[attr-defined]
    found = correlations.spearman(values, other)
    if len(set(values)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(stats.spearmanr(values, other).statistic, abs=1e-12)


def test_few_points_are_permuted_to_the_last_as_scipy_does() -> None:
    draw = np.random.default_rng(0)
    for n in (4, 6):
        a, b = draw.standard_normal((2, n))
        plain = stats.permutation_test(
            (a,),
            lambda x, b=b: stats.spearmanr(x, b).statistic,
            permutation_type="pairings",
            n_resamples=np.inf,
        )
        assert correlations.probability(a, b) == pytest.approx(plain.pvalue, abs=1e-12)


def test_many_points_have_students_probability() -> None:
    draw = np.random.default_rng(1)
    a, b = draw.standard_normal((2, 20))
    assert correlations.probability(a, b) == pytest.approx(stats.spearmanr(a, b).pvalue, rel=1e-9)


def test_the_interval_holds_the_truth_as_often_as_promised() -> None:
    draw = np.random.default_rng(2)
    truth = 6 / np.pi * np.arcsin(0.6 / 2)  # Spearman's, of normal pairs correlated by 0.6
    held = 0
    for _ in range(600):
        a, fresh = draw.standard_normal((2, 12))
        seen = correlations.spearman(a, 0.6 * a + 0.8 * fresh)
        assert seen is not None
        found = correlations.around(seen, 12)
        held += found.low <= truth <= found.high
    assert held / 600 >= 0.93  # one standard error is 0.9 %


def test_two_quantities_that_only_rise_are_worth_no_more_than_a_point() -> None:
    rising = np.arange(12.0)
    points = correlations.effective_points(rising, rising**2)
    assert points == pytest.approx(1.0)
    found = correlations.around(1.0, points)
    assert (found.low, found.high) == (-1.0, 1.0)


def test_walks_that_know_nothing_of_each_other_are_seldom_taken_for_related() -> None:
    draw = np.random.default_rng(4)
    naive = honest = 0
    for _ in range(300):
        a, b = draw.standard_normal((2, 20)).cumsum(axis=1)
        seen = correlations.spearman(a, b)
        assert seen is not None
        naive += not correlations.around(seen, 20).low <= 0 <= correlations.around(seen, 20).high
        points = correlations.effective_points(a, b)
        found = correlations.around(seen, points)
        honest += not found.low <= 0 <= found.high
    assert naive > 90
    assert honest <= 18  # 5 % of 300, and one standard error


@given(st.lists(st.floats(-10, 10), min_size=6, max_size=15, unique=True))
def test_what_goes_along_with_the_third_is_taken_out(third: list[float]) -> None:
    assert correlations.partial(third, third, third) is None


def test_a_partial_correlation_is_that_of_residuals_of_ranks() -> None:
    draw = np.random.default_rng(5)
    a, b, c = draw.standard_normal((3, 15))
    ranks = [stats.rankdata(v) for v in (a, b, c)]
    residuals = [r - np.polyval(np.polyfit(ranks[2], r, 1), ranks[2]) for r in ranks[:2]]
    plain = np.corrcoef(*residuals)[0, 1]
    assert correlations.partial(a, b, c) == pytest.approx(plain, abs=1e-9)
