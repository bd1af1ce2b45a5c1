"""Several draws: what the width of an interval is made of, and that it holds what it should."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from benchmarks.noise import Model, run
from benchmarks.trials import WORSE, measured_twins, said_to_differ, simulated
from benchmarks.trials import difference as difference_of_relative_errors
from qaudit.core.draws import DrawNoise, combined, draw_noise, moderated, pooled
from qaudit.core.power import (
    detectable,
    documents_for_width,
    documents_to_decide,
    documents_to_detect,
)
from qaudit.core.statistics import interval
from qaudit.types import Interval

Columns = tuple[np.ndarray, ...]


def ratio(sums: np.ndarray) -> np.ndarray:
    return sums[0] / sums[1] - 1


def difference(sums: np.ndarray) -> np.ndarray:
    return sums[0] / sums[1] - sums[2] / sums[3]


def drawn(draws: int, documents: int, between: float, rng: np.random.Generator) -> Columns:
    """Return (quantized, full) sums: a damage of 3 %, moved by the draw and by each document."""
    full = np.exp(0.3 * rng.standard_normal(documents)) * 100
    own = 0.03 + 0.02 * rng.standard_normal(documents)
    moved = between * rng.standard_normal((draws, 1))
    return full * (1 + own + moved + 0.01 * rng.standard_normal((draws, documents))), full


def test_one_draw_is_the_interval_over_documents() -> None:
    quantized, full = drawn(1, 40, 0.01, np.random.default_rng(0))
    found = pooled((quantized, full), ratio)
    assert found.interval == interval((quantized[0], full), ratio)
    assert found.draw is None


@given(st.integers(2, 6), st.integers(0, 99))
def test_equal_draws_add_nothing(draws: int, seed: int) -> None:
    quantized, full = drawn(1, 30, 0.0, np.random.default_rng(seed))
    found = pooled((np.repeat(quantized, draws, axis=0), full), ratio)
    alone = interval((quantized[0], full), ratio)
    assert found.draw == pytest.approx(0.0, abs=1e-12)
    assert found.interval.low == pytest.approx(alone.low, rel=1e-9)
    assert found.interval.high == pytest.approx(alone.high, rel=1e-9)


@given(st.integers(2, 5), st.integers(0, 99))
def test_the_order_of_draws_does_not_matter(draws: int, seed: int) -> None:
    quantized, full = drawn(draws, 25, 0.01, np.random.default_rng(seed))
    forward, backward = pooled((quantized, full), ratio), pooled((quantized[::-1], full), ratio)
    assert forward.interval.low == pytest.approx(backward.interval.low, rel=1e-9, abs=1e-12)
    assert forward.draw == pytest.approx(backward.draw, rel=1e-9)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 99), st.floats(0.0, 0.05))
def test_no_interval_is_narrower_than_that_over_documents(
    first: int, second: int, seed: int, between: float
) -> None:
    rng = np.random.default_rng(seed)
    (a, full), (b, other) = drawn(first, 25, between, rng), drawn(second, 25, between, rng)
    columns = (a, full, b, other)
    found = pooled(columns, difference).interval
    alone = interval(tuple(np.atleast_2d(c).mean(axis=0) for c in columns), difference)
    assert found.low <= alone.low
    assert found.high >= alone.high
    assert found.estimate == alone.estimate


def test_the_part_of_the_draws_is_their_scatter() -> None:
    quantized, full = drawn(6, 50, 0.02, np.random.default_rng(1))
    each = quantized.sum(axis=1) / full.sum() - 1
    assert pooled((quantized, full), ratio).draw == pytest.approx(np.std(each, ddof=1) / 6**0.5)


def test_the_draws_of_two_models_are_independent() -> None:
    """Welch's formula for two independent samples, written out, with draws alone for noise."""
    rng = np.random.default_rng(6)
    full = np.full(30, 100.0)
    a, b = (full * (1 + 0.02 * rng.standard_normal((draws, 1))) for draws in (3, 5))
    found = pooled((a, full, b, full), difference)
    samples = [column.sum(axis=1) / full.sum() for column in (a, b)]
    welch = stats.ttest_ind(*samples, equal_var=False).confidence_interval(0.95)
    # Documents have no scatter here; slopes are differences, exact where a quantity is linear.
    assert (found.interval.low, found.interval.high) == pytest.approx((welch.low, welch.high))


def test_one_noise_for_two_columns_has_the_freedom_of_both() -> None:
    """Student's two-sample formula with pooled variance, written out."""
    rng = np.random.default_rng(7)
    full = np.full(30, 100.0)
    a, b = (full * (1 + 0.02 * rng.standard_normal((4, 1))) for _ in range(2))
    relative = [column.sum(axis=1) / column.sum(axis=1).mean() for column in (a, b)]
    known = combined([DrawNoise(np.var(r, ddof=1), 0.0, 3.0) for r in relative])
    found = pooled((a, full, b, full), difference, noises=(known, None, known, None))
    student = stats.ttest_ind(*(column.sum(axis=1) / full.sum() for column in (a, b)))
    bounds = student.confidence_interval(0.95)
    # A noise is a fraction of a column's own total: the two totals differ by a percent or two.
    assert found.interval.low == pytest.approx(bounds.low, rel=0.05, abs=1e-3)
    assert found.interval.high == pytest.approx(bounds.high, rel=0.05, abs=1e-3)


def test_noises_of_the_same_estimates_have_the_freedom_of_one() -> None:
    """However each was scaled: luck in the estimates is luck in both columns."""
    rng = np.random.default_rng(11)
    full = np.full(30, 100.0)
    a, b = (full * (1 + 0.02 * rng.standard_normal((1, 30))) for _ in range(2))
    estimates = DrawNoise(0.02**2, 0.0, 2.0), DrawNoise(0.01**2, 0.0, 2.0)
    known = replace(combined(estimates), origin=estimates)
    columns = (a, full, b, full)
    alike = pooled(columns, difference, noises=(known, None, known.times(1.001), None))
    apart = pooled(columns, difference, noises=(known, None, replace(known, origin=()), None))
    assert alike.freedom == 4.0
    assert apart.freedom == pytest.approx(8.0, rel=1e-2)
    assert alike.draw == pytest.approx(apart.draw, rel=1e-2)
    assert alike.interval.high > apart.interval.high


def test_what_draws_do_to_documents_is_the_interaction_of_both() -> None:
    """Analysis of variance, written out: what rows and columns leave of a table."""
    full = np.full(60, 100.0)
    own = 0.01 * np.random.default_rng(8).standard_normal((3, 60))
    table = full * (1 + own)
    known = draw_noise(table)
    assert known is not None
    fractions = table / table.sum(axis=1).mean()
    rest = (
        fractions
        - fractions.mean(axis=1, keepdims=True)
        - fractions.mean(axis=0, keepdims=True)
        + fractions.mean()
    )
    mean_square = (rest**2).sum() / (2 * 59)
    # A sum of 60 documents has 60 times their variance. Here a draw moves documents by a fraction
    # of each and there by a constant, which differ by 1 % of documents times 0.1 % of draws.
    assert known.together == pytest.approx(60 * mean_square, rel=1e-3)
    assert known.variance == pytest.approx(np.var(fractions.sum(axis=1), ddof=1))


def test_a_column_that_is_another_to_the_bit_has_the_same_draw() -> None:
    quantized, full = drawn(3, 40, 0.02, np.random.default_rng(9))
    found = pooled((quantized, full, quantized, full), difference)
    assert found.interval == Interval(0.0, 0.0, 0.0)


def test_two_draws_that_disagree_make_a_wide_interval() -> None:
    quantized, full = drawn(1, 200, 0.0, np.random.default_rng(2))
    found = pooled((np.concatenate([quantized * 1.02, quantized]), full), ratio)
    # Two draws 2 points apart: nearly all of the width, with one degree of freedom.
    half = stats.t.ppf(0.975, 1) * 0.0206 / 2
    assert found.interval.high - found.interval.estimate == pytest.approx(half, rel=0.1)
    assert found.draw is not None
    assert found.documents < 0.25 * found.draw


def test_a_sum_that_is_no_number_has_no_interval() -> None:
    quantized, full = drawn(2, 20, 0.0, np.random.default_rng(3))
    quantized[0] *= math.nan
    assert not math.isfinite(pooled((quantized, full), ratio).interval.high)


@pytest.mark.parametrize(("draws", "between"), [(2, 0.0), (2, 0.02), (4, 0.005), (4, 0.02)])
def test_intervals_hold_the_expected_damage(draws: int, between: float) -> None:
    rng, held, trials = np.random.default_rng(draws), 0, 400
    for _ in range(trials):
        found = pooled(drawn(draws, 40, between, rng), ratio).interval
        held += found.low <= 0.03 <= found.high
    # 400 trials at 95 % hold 371 or more but once in a thousand; wider than promised is allowed.
    assert held >= 366


def test_measured_draws_of_one_model_are_not_said_to_differ() -> None:
    # 2.9 % in 2,000 trials; 400 trials at 5 % breach 34 times or more but once in a thousand.
    assert said_to_differ(measured_twins("gptq-3bit", 3), 101, trials=400, seed=0) < 34


def test_a_single_draw_of_each_errs_far_more_often() -> None:
    # The reason to repeat calibration: 22 % in 2,000 trials; 400 give fewer than 60 but once in
    # a thousand.
    assert said_to_differ(measured_twins("gptq-3bit", 1), 101, trials=400, seed=0) > 60


def test_three_draws_of_two_models_hold_what_the_benchmark_publishes() -> None:
    # 96.9 and 97.1 % are covered and 2.7 % differ in 4,000 trials. 300 trials at 93 % cover 265 or
    # more, and at 5 % differ 27 times or fewer, but once in a thousand.
    tally = run(Model.of("gptq-3bit"), 64, 300, 0)
    assert tally.held["3 draws"] >= 265
    assert tally.held["1 draw, widened"] >= 265
    assert max(tally.different.values()) <= 27
    assert sum(tally.swapped.values()) <= 2


# ------------------------------- the documents that a pilot names find what they should


def pair(
    rng: np.random.Generator, documents: int, draws: int, worse: float, of_draw: float
) -> Columns:
    full = 100 * np.exp(0.2 * rng.standard_normal(documents))
    own = 0.02 + 0.01 * rng.standard_normal(documents)

    def quantized(extra: float) -> np.ndarray:
        moved = of_draw * rng.standard_normal((draws, 1))
        return full * (1 + own + moved + extra + 0.03 * rng.standard_normal((draws, documents)))

    return quantized(worse), full, quantized(0), full


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


def test_more_draws_decide_where_draws_scatter_most() -> None:
    pilot = pair(np.random.default_rng(3), 100, 3, 0.02, 0.02)
    result = pooled(pilot, difference)
    numbers = [documents_to_decide(result, 0.0, 0.95, (3, draws)) for draws in (3, 5, 15)]
    assert numbers[0] is None
    assert numbers[2] is not None


def test_what_is_at_the_margin_is_decided_by_no_number_of_documents() -> None:
    result = pooled(pair(np.random.default_rng(4), 200, 1, 0.0, 0.0), difference)
    assert documents_to_decide(result, result.interval.estimate, 0.95) is None


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


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_as_many_documents_as_named_make_the_interval_so_narrow(share: float) -> None:
    rng = np.random.default_rng(5)
    quantized, full = drawn(1, 400, 0.0, rng)
    named = documents_for_width((quantized, full), ratio, share)
    assert named is not None
    reached = []
    for _ in range(20):
        fresh, beside = drawn(1, named, 0.0, rng)
        found = pooled((fresh, beside), ratio).interval
        reached.append(max(found.high - found.estimate, found.estimate - found.low) / 0.03)
    # Pilot and trials know the scatter of documents to 4 % and 15 % / sqrt(20) here.
    assert np.mean(reached) == pytest.approx(share, rel=0.15)


def test_no_number_of_documents_makes_an_interval_around_nothing_relatively_narrow() -> None:
    full = np.linspace(50.0, 150.0, 20)
    assert documents_for_width((full, full), ratio, 0.1) is None


# ------------------------------------------------------------------------------ moderated


def noises(scatter: float, cells: int, draws: int, generator: np.random.Generator) -> Any:
    """Return the logarithm of the first cell's true variance, and an estimate for each cell."""
    log_K = generator.normal(0, 2 * scatter, cells)
    drawn_K = np.exp(log_K) * generator.chisquare(draws - 1, cells) / (draws - 1)
    return log_K[0], [DrawNoise(float(v), 0.0, draws - 1.0) for v in drawn_K]


@pytest.mark.parametrize(("draws", "widest"), [(3, 3.1), (5, 2.6), (7, 2.4)])
def test_a_moderated_variance_covers_with_narrower_intervals(draws: int, widest: float) -> None:
    generator, hits, reach = np.random.default_rng(1), 0, 0.0
    for _ in range(4000):
        log, (own, *others) = noises(0.5, 4, draws, generator)
        noise = moderated(own, others)
        far = special.stdtrit(noise.freedom, 0.975) * np.sqrt(noise.variance)
        hits += abs(generator.normal(0, np.exp(log / 2))) <= far
        reach += far / np.exp(log / 2) / 4000
    assert hits / 4000 > 0.94 - 0.007  # two standard errors of so many
    assert reach < min(widest, special.stdtrit(draws - 1, 0.975))


def test_without_other_cells_or_any_scatter_a_variance_is_its_own() -> None:
    own = DrawNoise(2.0, 0.5, 2.0)
    still = DrawNoise(0.0, 0.0, 2.0)
    assert moderated(own, []) == own
    assert moderated(own, [still]) == own
    assert moderated(still, [own]) == still
    alike = moderated(own, [own] * 5)
    assert alike.freedom > own.freedom
    assert alike.together == pytest.approx(0.5)
