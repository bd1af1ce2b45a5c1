"""What seeds show: intervals over seeds against scipy's, contrasts against an audit's own."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from experiments.contrasts import (
    MeasuredSeed,
    estimate,
    log_ratio,
    points_of,
    result_of,
    standing,
)
from experiments.types import Contrast
from qaudit.core import statistics
from qaudit.core.statistics import over_repetitions
from qaudit.types import Evidence, Fidelity, Interval

NUMBERS = st.floats(-10, 10, allow_nan=False)


def evidence(seed: int, level: float = 2.0, documents: int = 12) -> Evidence:
    draw = np.random.default_rng(seed)
    tokens = np.random.default_rng(0).integers(20, 60, size=documents)
    return Evidence(
        document_sha256=tuple(f"{k:064x}" for k in range(documents)),
        nll_sum=tokens * (level + 0.1 * draw.standard_normal(documents)),
        tokens=tokens,
        nbytes=4 * tokens,
        split=("selection",) * documents,
    )


def with_kl(found: Evidence, level: float) -> Evidence:
    """Give evidence a divergence of so much per token; what else is recorded is not read here."""
    none = np.zeros(len(found.tokens), dtype=np.int64)
    kl_sum = level * found.tokens * np.linspace(0.8, 1.2, len(found.tokens))
    return replace(found, fidelity=Fidelity(kl_sum, kl_sum, none[:, None], none, kl_sum))


def seed_of(seed: int, worse: float) -> MeasuredSeed:
    return MeasuredSeed(
        {
            ("a", "fp"): evidence(10 * seed + 1),
            ("b", "fp"): evidence(10 * seed + 2),
            ("a", "rtn-3bit"): with_kl(evidence(10 * seed + 3, 2.2 + worse), 0.2),
            ("b", "rtn-3bit"): with_kl(evidence(10 * seed + 4, 2.2), 0.1),
        },
        traces={"a": Interval(30.0, 20.0, 45.0), "b": Interval(10.0, 8.0, 12.5)},
    )


def contrast(measure: str = "error", expect: str | None = "higher", margin: float = 0.0):
    return Contrast("c", "a against b", "a", "b", measure, "rtn-3bit", expect, margin)


@given(st.lists(NUMBERS, min_size=2, max_size=9), st.sampled_from([0.8, 0.95, 0.99]))
def test_the_interval_over_seeds_is_student_s(values: list[float], confidence: float) -> None:
    found = over_repetitions(values, confidence)
    assert found is not None
    error = scipy.stats.sem(values)
    if error < 1e-12:  # scipy answers nan where there is no spread
        assert found.high - found.low < 1e-9
        return
    low, high = scipy.stats.t.interval(confidence, len(values) - 1, np.mean(values), error)
    # Both are a handful of additions and one quantile: they differ by rounding alone.
    np.testing.assert_allclose([found.low, found.high], [low, high], rtol=1e-9, atol=1e-12)


def test_one_seed_gives_no_interval_and_no_claim() -> None:
    result = result_of(contrast(), {1: seed_of(1, 5.0)}, 0.95)
    assert result.interval is None
    assert result.seeds[0].interval.low > 0
    assert result.standing == "inconclusive"


@pytest.mark.parametrize("measure", ["error", "lost", "loss", "kl"])
def test_a_seed_s_contrast_is_what_an_audit_says_of_the_pair(measure: str) -> None:
    seed = seed_of(1, 0.3)
    found = seed.evidence
    nll = {key: e.nll_sum for key, e in found.items()}
    kl = [found[label, "rtn-3bit"].fidelity.kl_sum for label in "ab"]
    a = (nll["a", "rtn-3bit"], nll["a", "fp"])
    b = (nll["b", "rtn-3bit"], nll["b", "fp"])
    tokens = found["a", "fp"].tokens
    wanted = {
        "error": statistics.interval((*a, *b), statistics.excess_difference),
        "lost": statistics.interval((*a, *b, tokens), statistics.change_difference),
        "loss": statistics.outright(a[0], b[0], tokens),
        "kl": statistics.interval((*kl, tokens), statistics.change),
    }
    assert estimate(contrast(measure), seed, 0.95) == wanted[measure]


def test_a_divergence_that_was_not_recorded_is_not_measured() -> None:
    found = seed_of(1, 0.3)
    bare = {key: replace(e, fidelity=None) for key, e in found.evidence.items()}
    assert estimate(contrast("kl"), MeasuredSeed(bare), 0.95) is None


def test_traces_are_compared_by_their_ratio() -> None:
    found = estimate(contrast("trace"), seed_of(1, 0.3), 0.95)
    assert found is not None
    # The larger of the two steps decides: 30/20 below against 12.5/10, 45/30 above against 10/8.
    half = math.hypot(math.log(1.5), math.log(1.25))
    assert [found.estimate, found.low, found.high] == pytest.approx(
        [math.log(3), math.log(3) - half, math.log(3) + half], rel=1e-12
    )
    assert estimate(contrast("trace"), MeasuredSeed(seed_of(1, 0.3).evidence), 0.95) is None
    assert log_ratio(Interval(1.0, -0.1, 2.0), Interval(1.0, 0.9, 1.1)) is None


def test_a_contrast_that_lacks_a_model_is_not_measured() -> None:
    found = seed_of(1, 0.3)
    del found.evidence["b", "rtn-3bit"]  # type: ignore[attr-defined]
    result = result_of(contrast(), {1: found}, 0.95)
    assert (result.seeds, result.interval, result.standing) == ((), None, "not measured")


def test_a_loss_that_is_no_number_is_not_measured() -> None:
    found = seed_of(1, 0.3)
    found.evidence["a", "rtn-3bit"].nll_sum[3] = np.nan
    assert estimate(contrast(), found, 0.95) is None


@pytest.mark.parametrize(
    ("expect", "margin", "interval", "wanted"),
    [
        ("higher", 0.0, (0.1, 0.3), "agrees"),
        ("higher", 0.0, (-0.3, -0.1), "disagrees"),
        ("higher", 0.0, (-0.1, 0.3), "inconclusive"),
        ("lower", 0.0, (-0.3, -0.1), "agrees"),
        ("lower", 0.0, (0.1, 0.3), "disagrees"),
        ("near", 0.5, (-0.1, 0.3), "agrees"),
        ("near", 0.5, (0.6, 0.9), "disagrees"),
        ("near", 0.5, (-0.9, -0.6), "disagrees"),
        ("near", 0.5, (-0.1, 0.6), "inconclusive"),
        (None, 0.0, (0.1, 0.3), "open"),
    ],
)
def test_a_claim_stands_with_the_interval_over_seeds(expect, margin, interval, wanted) -> None:
    low, high = interval
    found = Interval((low + high) / 2, low, high)
    assert standing(contrast(expect=expect, margin=margin), 3, found) == wanted


def test_a_margin_that_exceeds_both_errors_decides_nothing() -> None:
    inside = Interval(0.001, -0.001, 0.003)
    near = contrast(expect="near", margin=0.005)
    assert standing(near, 3, inside, (0.004, -0.003)) == "too wide"
    assert standing(near, 3, inside, (0.004, 0.006)) == "agrees"
    assert standing(contrast("loss", expect="near", margin=0.005), 3, inside, (0.004,)) == "agrees"


def test_a_claim_that_nothing_was_measured_of_does_not_stand() -> None:
    assert standing(contrast(), 0, None) == "not measured"


def test_seeds_that_agree_settle_a_claim_and_seeds_that_scatter_do_not() -> None:
    alike = {seed: seed_of(seed, 1.0) for seed in (1, 2, 3)}
    apart = {seed: seed_of(seed, worse) for seed, worse in ((1, 1.0), (2, -1.0), (3, 0.2))}
    assert result_of(contrast(), alike, 0.95).standing == "agrees"
    assert result_of(contrast(), apart, 0.95).standing == "inconclusive"


def test_points_hold_the_relative_error_of_every_quantized_model() -> None:
    found = seed_of(1, 0.3)
    points = points_of(1, found, 0.95)
    assert [(p.subject, p.scheme) for p in points] == [("a", "rtn-3bit"), ("b", "rtn-3bit")]
    pair = found.evidence["a", "rtn-3bit"].nll_sum, found.evidence["a", "fp"].nll_sum
    assert points[0].interval == statistics.relative_error(*pair)
    assert points[0].quantized / points[0].loss - 1 == pytest.approx(points[0].interval.estimate)
