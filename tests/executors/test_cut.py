"""Cuts by cost: every unit once, twins together, soups behind members, parts nearly equal."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cut import alone, checkpoint, cost, outcome, scan, soup
from qaudit.executors.folder import cut, in_line


@pytest.mark.parametrize("count", [16, 64])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "node-local"])
def test_a_real_scan_is_cut_within_15_percent_of_the_lower_bound(count: int, shared: bool) -> None:
    units = scan()
    one = outcome(units, count, shared=shared)
    needed = len({c.content for u in units for c in u.checkpoints})
    assert one.makespan <= 1.15, one
    assert needed <= one.fetched < one.in_turn


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    count=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_every_unit_is_in_one_part_and_twins_are_together(sizes, count, seed) -> None:
    draw = random.Random(seed)
    series = [checkpoint(n, nbytes) for n, nbytes in enumerate(sizes)]
    units = [alone(one, draw.uniform(1, 9)) for one in series]
    twin = alone(series[draw.randrange(len(series))], 5.0, label="twin")
    members = draw.sample(series, min(3, len(series)))
    units += [twin, soup("soup", members, 3.0)]
    parts = cut(units, count)
    assert sorted(u.label for part in parts for u in part) == sorted(u.label for u in units)
    assert all(parts) and len(parts) <= count
    (with_twin,) = [part for part in parts if twin in part]
    assert [u for u in with_twin if u.subject.content == twin.subject.content and u is not twin]
    line = in_line(units)
    place = {u.label: k for k, u in enumerate(line)}
    assert all(place[c.label] < place["soup"] for c in members)
    assert cut(units, count) == parts
    assert cut(units, 1) == (line,) or {u.label for u in cut(units, 1)[0]} == set(place)


def test_a_part_is_never_larger_than_it_must_be() -> None:
    units = [alone(checkpoint(n, 0), 1.0) for n in range(10)]
    assert [len(part) for part in cut(units, 5)] == [2] * 5
    assert math.isclose(max(cost(part) for part in cut(units, 3)), 4.0)
    assert cut([], 4) == ()
