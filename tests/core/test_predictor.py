"""A predictor is worth what it is at points it has not seen, and used only where that is more."""

import numpy as np
import pytest
from scipy import integrate, stats

from qaudit.core.predictor import (
    MINIMUM_POINTS,
    PENALTIES,
    Known,
    Predicted,
    between,
    leave_one_out,
    predict,
)


def known(n=12, noise=0.01, seed=0):
    """Return points whose value follows the second signal, whatever their place."""
    draw = np.random.default_rng(seed)
    signals = draw.standard_normal((n, 3))
    values = 1 + 0.5 * signals[:, 1] + noise * draw.standard_normal(n)
    return Known(np.arange(float(n)), signals, values)


def test_leaving_one_out_in_closed_form_is_a_plain_loop():
    of = known()
    for penalty in PENALTIES:
        plain = []
        for k in range(len(of.values_N)):
            rest = np.delete(np.arange(len(of.values_N)), k)
            x, y = of.signals_NF[rest], of.values_N[rest]
            middle = x.mean(axis=0)
            inner = (x - middle).T @ (x - middle) + penalty * np.eye(3)
            slope = np.linalg.solve(inner, (x - middle).T @ (y - y.mean()))
            plain.append(of.values_N[k] - y.mean() - (of.signals_NF[k] - middle) @ slope)
        assert np.allclose(leave_one_out(of.signals_NF, of.values_N, penalty), plain, atol=1e-12)


def test_a_left_out_point_is_not_seen_by_its_own_prediction():
    of, moved = known(), known()
    moved.values_N[4] += 1000
    before, after = (predict(one, of.positions_N[:1], of.signals_NF[:1]) for one in (of, moved))
    assert before.left_out["signals"] < 0.1
    assert after.left_out["signals"] > 250  # about 1000 / sqrt(12), and what it does to others


def test_signals_are_used_where_they_tell_and_not_where_they_tell_nothing():
    of = known()
    new = np.array([[0.0, 2.0, 0.0], [0.0, -2.0, 0.0]])
    found = predict(of, np.array([3.5, 20.0]), new)
    assert (found.method, found.freedom) == ("signals", 10)
    assert found.left_out["signals"] < min(found.left_out["neighbours"], found.left_out["mean"])
    assert found.values_M == pytest.approx([2.0, 0.0], abs=0.1)
    assert found.errors_M[0] > found.left_out["signals"]
    draw = np.random.default_rng(0)
    x = np.arange(14.0)
    smooth = Known(x, draw.standard_normal((14, 3)), np.sin(x / 3))
    assert predict(smooth, x[:1] + 0.5, smooth.signals_NF[:1]).method == "neighbours"
    methods = []
    for _ in range(20):
        noise = Known(x, draw.standard_normal((14, 3)), draw.standard_normal(14))
        methods.append(predict(noise, x[:1], np.zeros((1, 3))).method)
    assert methods.count("mean") >= 14
    assert methods.count("signals") <= 3


def test_intervals_hold_new_values_as_often_as_promised():
    held = []
    for seed in range(80):
        of = known(13, noise=0.2, seed=seed)
        seen = Known(of.positions_N[:12], of.signals_NF[:12], of.values_N[:12])
        found = predict(seen, of.positions_N[12:], of.signals_NF[12:])
        half = found.reach(0.95) * found.errors_M[0]
        held.append(abs(found.values_M[0] - of.values_N[12]) <= half)
    assert np.mean(held) >= 0.91  # 95 % less two standard errors


def test_gains_and_chances_are_those_of_students_density():
    found = Predicted(np.array([1.0, 1.5]), np.array([0.2, 0.05]), "mean", {}, 7)
    for m in range(2):
        density = stats.t(7, loc=found.values_M[m], scale=found.errors_M[m])
        plain, _ = integrate.quad(lambda v, d=density: (1.1 - v) * d.pdf(v), -20, 1.1, limit=200)
        assert found.gains(1.1)[m] == pytest.approx(plain, rel=1e-4, abs=1e-9)
        assert found.below(1.1)[m] == pytest.approx(density.cdf(1.1))


def test_neighbours_at_one_place_are_averaged_ends_held_and_few_points_predict_nothing():
    x, y = np.array([1.0, 2.0, 2.0, 4.0]), np.array([0.0, 1.0, 3.0, 4.0])
    assert between(x, y, np.array([0.0, 2.0, 3.0, 9.0])).tolist() == [0.0, 2.0, 3.0, 4.0]
    of = known(MINIMUM_POINTS - 1)
    with pytest.raises(ValueError, match="too few"):
        predict(of, of.positions_N, of.signals_NF)
