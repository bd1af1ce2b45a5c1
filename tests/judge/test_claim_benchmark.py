"""What benchmarks of verdicts measured: that it holds, and of which schemes it is."""

import numpy as np
import pytest

from benchmarks.claim import judged, reaches, tied
from benchmarks.deciding import followed
from benchmarks.evidence import SCHEMES, recorded
from qaudit.core import statistics
from qaudit.core.registry import parse_scheme


def test_recorded_specs_are_those_of_the_defaults():
    assert SCHEMES
    for scheme in SCHEMES:
        assert recorded().about["schemes"][scheme] == parse_scheme(scheme).spec


@pytest.mark.parametrize("part", [0.7, 1.3])
def test_the_printed_command_decides_in_four_of_five_cases(part):
    found = followed("lognormal", part, 64, 150)
    # 150 trials of which a third is undecided: an error of 3 points beside 99 %.
    assert found.commands >= 0.9 * found.undecided > 0
    assert found.decided >= 0.8 * found.commands
    assert found.wrong <= 3


def test_the_best_of_many_ships_wrongly_in_one_of_forty_at_most():
    draw = np.random.default_rng(0)
    full = np.exp(0.3 * draw.standard_normal((4, 400))) * 100
    added = 0.014 * full[:, None] * np.exp(0.4 * draw.standard_normal((4, 3, 400)))
    full, added = tied(full, added)
    truth = added.sum(2) / full.sum(1)[:, None]
    assert truth == pytest.approx(0.014)
    high, low, _ = judged(full, added, 64, 600, 1)
    assert (high.min(0) <= 0.014).mean() <= 0.04  # of 600: an error of 0.6 points
    may_ship = np.isfinite(high).sum(0)
    assert ((may_ship > 0) & (may_ship <= 3)).all()  # schemes of the leader's subject
    assert (low < high).all()


def test_the_benchmark_has_the_interval_of_the_product():
    draw = np.random.default_rng(3)
    full = np.exp(0.3 * draw.standard_normal(64)) * 100
    quantized = full * (1 + 0.02 * np.exp(draw.standard_normal(64)))
    estimate, below, above = reaches(quantized, full, 0.025 / 3)
    plain, paid = (
        statistics.relative_error(quantized, full, level) for level in (0.95, 1 - 0.05 / 3)
    )
    assert estimate - below == pytest.approx(plain.low)
    assert estimate + above == pytest.approx(paid.high)
