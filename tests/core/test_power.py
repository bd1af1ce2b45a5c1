"""The number of documents that a pilot names finds what it should, as often as promised."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.trials import WORSE, simulated
from benchmarks.trials import difference as difference_of_relative_errors
from qaudit.core.draws import detectable, documents_to_detect, pooled

Draws = list[tuple[np.ndarray, ...]]


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
