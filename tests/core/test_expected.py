"""What error to expect before a model is measured: the fit, its worth, and what ships."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import scipy.stats

from experiments.expected import fitted, rounded
from qaudit.core.expected import FILE, UNIT, ExpectedError, expectations, fit, signals


def drawn(seed: int, runs: int = 12, between: float = 0.3) -> tuple[np.ndarray, ...]:
    """Draw errors of runs that differ as wholes, four checkpoints each."""
    draw = np.random.default_rng(seed)
    names = np.repeat([f"run{k}" for k in range(runs)], 4)
    tokens, decayed = draw.uniform(1, 5, 4 * runs), draw.choice([0.0, 1.0], 4 * runs)
    rows = np.array([signals(t, d) for t, d in zip(tokens, decayed, strict=True)])
    noise = np.repeat(draw.normal(0, between, runs), 4) + draw.normal(0, 0.1, 4 * runs)
    return names, rows, UNIT * np.sinh(rows @ [0.5, 1.5, 0.4] + noise)


def test_the_line_is_that_of_scipy_s_least_squares() -> None:
    names, rows, errors = drawn(1)
    found = fit("rtn-3bit", names, rows[:, [0, 1, 2]], errors)
    slope = scipy.stats.linregress(rows[:, 1], np.arcsinh(errors / UNIT)).slope
    alone = fit("rtn-3bit", names, rows * [1, 1, 0], errors)  # without the second signal
    assert alone.coefficients[1] == pytest.approx(slope, rel=1e-9)
    assert (found.runs, found.points) == (12, 48)


def test_the_interval_covers_runs_that_were_left_out_as_often_as_it_says() -> None:
    worth = [fit("s", *drawn(seed)).coverage for seed in range(60)]
    # 90 % intervals, 60 times 48 points that share 720 runs: a standard error of about 1.5 %.
    assert 0.85 < float(np.mean(worth)) < 0.96


def test_an_error_is_expected_between_its_bounds_and_grows_with_what_it_was_fitted_to() -> None:
    line = ExpectedError("s", (0.0, 1.0, 0.5), spread=0.3, coverage=0.9, runs=12, points=48)
    early, late, decayed = line.at(1.0, 0.0), line.at(5.0, 0.0), line.at(5.0, 1.0)
    assert early.low < early.estimate < early.high
    assert early.estimate == 0.0
    assert late.estimate < decayed.estimate
    assert late.estimate == pytest.approx(UNIT * np.sinh(np.log(5.0)))


def test_what_ships_is_the_fit_of_what_is_published() -> None:
    shipped = json.loads(FILE.read_text(encoding="utf-8"))
    assert shipped == rounded(asdict(fitted())), "run `python -m experiments.expected`"


def test_what_ships_covered_runs_that_were_left_out() -> None:
    for error in expectations().errors:
        assert error.coverage >= 0.85, error.scheme


def test_nothing_is_expected_of_other_sizes_and_longer_runs() -> None:
    ours = expectations()
    assert ours.covers(ours.parameters, 3 * ours.parameters)
    assert not ours.covers(7_000_000_000, 21_000_000_000)
    assert not ours.covers(ours.parameters, 400 * ours.parameters)
