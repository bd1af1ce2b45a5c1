"""A break is found where it is, seldom where it is not, and never among too few points."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks.changepoint import BROKEN, CHANCE, SMOOTH, looked_at, positions, series, shares
from qaudit.core import statistics
from qaudit.core.changepoint import (
    MINIMUM_POINTS,
    Breaks,
    Trajectory,
    _Contrasts,
    find_break,
    trajectory,
)

TRIALS, SAMPLES = 60, 199
BY_NAME = {case.name: case for case in (*SMOOTH, *BROKEN)}


@pytest.mark.parametrize("name", ["straight", "saturating"])
def test_a_course_without_a_break_raises_few_false_alarms(name: str) -> None:
    found = list(looked_at(BY_NAME[name], 12, 64, TRIALS, SAMPLES))
    # 60 trials at 5 %: 7 or more alarms are a chance of 3 % at the very edge of the promise.
    assert sum(course.against_curve <= CHANCE for course in found) <= 6


def test_a_jump_is_found_and_its_interval_holds_it() -> None:
    case = BY_NAME["jump by half"]
    row = shares(case, list(looked_at(case, 24, 64, 30, SAMPLES)))
    assert row["found"] is not None and row["found"] >= 80
    assert row["holds"] is not None and row["holds"] >= 90


def test_a_turn_is_held_by_its_interval() -> None:
    case = BY_NAME["slope x 16"]
    row = shares(case, list(looked_at(case, 12, 64, 40, SAMPLES)))
    assert row["holds"] is not None and row["holds"] >= 87.5


def test_the_same_series_is_judged_the_same_twice() -> None:
    case = BY_NAME["slope x 16"]
    first, again = (list(looked_at(case, 9, 20, 2, SAMPLES)) for _ in range(2))
    assert first == again


def test_fewer_points_than_the_minimum_are_refused() -> None:
    few = MINIMUM_POINTS - 1
    sums = series(np.random.default_rng(0), SMOOTH[0], few, 20)
    with pytest.raises(ValueError, match="too few"):
        find_break(trajectory(positions(few), sums, statistics.excess, samples=20))


def test_samples_of_documents_move_checkpoints_together_as_the_jackknife_says() -> None:
    sums = series(np.random.default_rng(3), SMOOTH[0], 8, 64)
    found = trajectory(positions(8), sums, statistics.excess, samples=4000)
    influence_ND = np.stack(
        [statistics.influences(tuple(sums[:, k]), statistics.excess)[1] for k in range(8)]
    )
    wide = (1 + 1 / 64) ** 2
    plain_NN = wide * influence_ND @ influence_ND.T / (64 * 63)
    sampled_NN = np.cov(found.moved_BN.T)
    # 4,000 samples know a standard deviation to about 1 %, and the jackknife is of first order.
    assert np.allclose(np.sqrt(np.diag(sampled_NN)), np.sqrt(np.diag(plain_NN)), rtol=0.08)
    assert np.allclose(sampled_NN, plain_NN, atol=0.1 * plain_NN.max())


def test_the_likelihood_is_that_of_a_plain_normal_density() -> None:
    draw = np.random.default_rng(0)
    x = np.linspace(0, 1, 9)
    mixed = np.eye(9) + 0.1 * draw.standard_normal((9, 9))  # none is lifted to the floor
    found = Trajectory(
        x, 3 + 2 * x + draw.standard_normal(9), draw.standard_normal((500, 9)) @ mixed
    )
    places = Breaks(x)
    mean = next(places.means())
    line = _Contrasts.of(mean, places.shapes_CN, found)
    seen_1M = (found.values_N @ line.basis_NM)[None]
    spread_NN = found.moved_BN.T @ found.moved_BN / 500
    for which in (3, 8):
        variance = line.variances[which]
        spread_MM = line.basis_NM.T @ (spread_NN + variance * np.eye(9)) @ line.basis_NM
        dense = stats.multivariate_normal(np.zeros(7), spread_MM)
        constant = -3.5 * np.log(2 * np.pi)
        none = line.without(seen_1M)[which, 0]
        assert none + constant == pytest.approx(dense.logpdf(seen_1M[0]), rel=1e-9)
        shape_M = line.shapes_CM[4]
        inverse = np.linalg.inv(spread_MM)
        size = (shape_M @ inverse @ seen_1M[0]) / (shape_M @ inverse @ shape_M)
        plain = dense.logpdf(seen_1M[0] - size * shape_M) - dense.logpdf(seen_1M[0])
        assert line.gains(seen_1M, line.weights[which])[4, 0] == pytest.approx(plain, rel=1e-9)


def test_level_slope_and_unit_of_a_course_do_not_matter() -> None:
    draw = np.random.default_rng(1)
    moved = 0.01 * draw.standard_normal((300, 10))
    x = np.linspace(1, 10, 10)
    y = 0.1 * x + 0.5 * np.maximum(0, x - 6) + 0.01 * draw.standard_normal(10)
    one = find_break(Trajectory(x, y, moved))
    other = find_break(Trajectory(1e9 * x, 7 + 3 * (y + x), 3 * moved))
    assert other.against_line == one.against_line
    assert other.best.at.estimate == pytest.approx(1e9 * one.best.at.estimate)
    assert other.best.effect.estimate == pytest.approx(3e-9 * one.best.effect.estimate, rel=1e-6)
    assert one.best.kind == "turn"
    assert one.best.at.low <= 6 <= one.best.at.high


def test_a_break_has_two_checkpoints_on_either_side() -> None:
    places = Breaks(np.arange(9.0))
    assert (places.at_C > places.x_N[1]).all()
    assert (places.at_C < places.x_N[-2]).all()
