"""Cuts by cost: every unit once, twins together, soups behind members, parts nearly equal."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.executors.cut import FLOPS_PER_BYTE, cut, in_line
from qaudit.types import Checkpoint, Pass, Price, Ref, Subject, WeightFile, WorkUnit

GB = 10**9
SIZES = (7, 14, 32)  # billions of parameters, in bf16


def checkpoint(number: int, nbytes: int) -> Checkpoint:
    files = (WeightFile("model.safetensors", nbytes, f"{number:064x}"),)
    return Checkpoint(Ref("org/model", f"step{number}"), f"step{number}", files)


def unit(subject: Subject, flops: float) -> WorkUnit:
    return WorkUnit((Pass(subject, ("rtn:bits=4",), price=Price(flops)),))


def alone(one: Checkpoint, flops: float, label: str = "") -> WorkUnit:
    return unit(Subject(label or one.label, ((one, 1.0),)), flops)


def soup(label: str, members: list[Checkpoint], flops: float) -> WorkUnit:
    return unit(Subject(label, tuple((c, 1 / len(members)) for c in members), "mean"), flops)


def cost(part: tuple[WorkUnit, ...]) -> float:
    nbytes = {c.content: c.nbytes for u in part for c in u.checkpoints}
    return sum(u.flops for u in part) + FLOPS_PER_BYTE * sum(nbytes.values())


def scan(seed: int = 0) -> list[WorkUnit]:
    """Return 154 checkpoints of three sizes and 22 soups of their neighbours."""
    draw = random.Random(seed)
    series, units, soups = [], [], []
    for number in range(154):
        billions = SIZES[number * len(SIZES) // 154]
        one = checkpoint(number, 2 * billions * GB)
        series.append(one)
        units.append(alone(one, 2e15 * billions * draw.uniform(0.9, 1.1)))
    for number in range(22):
        first = number * 7
        members = series[first : first + draw.randint(2, 4)]
        soups.append(soup(f"soup{number}", members, 2e15 * members[0].nbytes / 2 / GB))
    return units + soups


@pytest.mark.parametrize("count", [16, 64])
@pytest.mark.parametrize("cache", ["shared", "node-local"])
def test_a_real_scan_is_cut_within_15_percent_of_the_lower_bound(count: int, cache: str) -> None:
    units = scan()
    parts = cut(units, count)
    fetched = sum(len({c.content for u in part for c in u.checkpoints}) for part in parts)
    needed = len({c.content for u in units for c in u.checkpoints})
    if cache == "shared":  # reading it is free once any part has it: count arithmetic alone
        costs = [sum(u.flops for u in part) for part in parts]
        bound = max(sum(costs) / count, max(u.flops for u in units))
    else:
        costs = [cost(part) for part in parts]
        bound = max(cost(tuple(units)) / count, max(cost((u,)) for u in units))
    assert len(parts) <= count
    assert max(costs) <= 1.15 * bound, (max(costs) / bound, fetched)
    in_turn = [units[k::count] for k in range(count)]
    turned = sum(len({c.content for u in part for c in u.checkpoints}) for part in in_turn)
    assert needed <= fetched < turned


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
