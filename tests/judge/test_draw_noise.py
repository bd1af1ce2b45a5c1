"""A draw's noise at other damage than that of the cells that were drawn several times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.damage import covered, power_of, recorded
from qaudit.core.draws import DrawNoise
from qaudit.judge.draw_noise import carried


@given(noise=st.floats(1e-6, 0.1), damage=st.floats(1e-5, 0.5), other=st.floats(1e-5, 0.5))
def test_noise_is_carried_over_by_the_damage(noise: float, damage: float, other: float) -> None:
    """It grows with the damage, and by the cube root where that lessens it."""
    known = DrawNoise(noise**2, noise**2 / 4, 2.0)
    there = carried(known, damage, other)
    assert carried(known, damage, damage) == carried(known, damage, None) == known
    assert carried(known, None, other) == carried(known, 0.0, other) == known
    assert there.freedom == known.freedom
    assert there.together == pytest.approx(there.variance / 4)
    if other <= damage:
        assert there.variance == pytest.approx(known.variance * (other / damage) ** (2 / 3))
    assert (there.variance > known.variance) == (other > damage) or other == pytest.approx(damage)


@pytest.mark.slow
def test_measured_draws_hold_what_the_benchmark_publishes() -> None:
    subjects = recorded()
    held = {name: share for name, (share, _, _) in covered(subjects, carried).items()}
    assert min(held.values()) >= 0.93, held
    in_proportion = covered(subjects, lambda noise, damage, other: noise.times(other / damage))
    assert in_proportion["less than 2/3"][0] < 0.85
    assert covered(subjects, lambda noise, *_: noise)["more"][0] < 0.92
    power, error = power_of(subjects)
    assert power + 2 * error < 1
