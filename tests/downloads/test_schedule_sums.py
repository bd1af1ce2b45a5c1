"""Members are added to their soup's sum as they pass by, in order, once, within the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.downloads.schedule import DownloadSchedule, Step, SumSize
from qaudit.errors import MachineError
from tests.support.downloads import total

KEYS = "abcdef"


@st.composite
def schedules(draw: st.DrawFn) -> DownloadSchedule:
    """Draw a schedule whose soups can be summed, some begun, under a budget that is enough."""
    keys = st.lists(st.sampled_from(KEYS), max_size=4, unique=True)
    needs = tuple(tuple(k) for k in draw(st.lists(keys, max_size=7)))
    nbytes = {key: draw(st.integers(0, 9)) for key in KEYS}
    cached = draw(st.frozensets(st.sampled_from(KEYS), max_size=1))
    present = draw(st.frozensets(st.sampled_from(KEYS), max_size=2)) - cached
    sums = {p: draw(summed(keys)) for p, keys in enumerate(needs) if len(keys) > 1}
    free = DownloadSchedule(needs, nbytes, cached, present, None, (), sums)
    fresh = {p: replace(one, begun=False, added=0) for p, one in sums.items()}
    anew = replace(free, sums=fresh)
    least = max((anew.at_once_nbytes(p) for p in range(len(needs))), default=0)
    more = draw(st.none() | st.integers(0, 9))
    return replace(free, budget=None if more is None else least + more).settled()


@st.composite
def summed(draw: st.DrawFn, keys: Sequence[str]) -> SumSize:
    local = draw(st.sampled_from([(), (), ("local",)]))  # a member that lies in a folder here
    members = tuple(draw(st.permutations([*keys, *local])))
    begun = draw(st.booleans())
    merged = draw(st.integers(0, 9))
    added = draw(st.integers(0, len(members))) if begun else 0
    return SumSize(members, merged + draw(st.integers(0, 9)), merged, begun, added)


def walked(schedule: DownloadSchedule, steps: Sequence[Step]) -> list[int]:
    """Walk the steps, fail on one that cannot be taken, and return what lies there after each."""
    there, checked, loads = set(schedule.present), set[str](), []
    lying = {p: one.nbytes for p, one in schedule.summed.items()}
    lacking = {p: list(one.missing) for p, one in schedule.summed.items()}
    for step in steps:
        if step.kind == "fetch":
            assert step.key not in there | schedule.cached
            there.add(step.key)
            checked.add(step.key)
        elif step.kind == "check":
            assert step.key in there | schedule.cached
            checked.add(step.key)
        elif step.kind == "evict":
            there.remove(step.key)
            checked.discard(step.key)
        elif step.kind == "add":
            assert step.key in checked | {"local"}
            assert lacking[step.position].pop(0) == step.key
            one = schedule.sums[step.position]
            loads.append(
                total(schedule, there) + sum({**lying, step.position: one.growing_nbytes}.values())
            )
            lying[step.position] = (
                one.growing_nbytes if lacking[step.position] else one.merged_nbytes
            )
        elif step.kind == "drop":
            del lying[step.position]
        elif step.position in schedule.summed:
            assert lacking[step.position] == []
        else:
            assert set(schedule.needs[step.position]) <= checked
        loads.append(total(schedule, there) + sum(lying.values()))
    assert not lying
    return loads


def words(steps: Sequence[Step]) -> str:
    """Print steps in short: `a>0` adds a to the sum of 0, `0` measures it, `~0` drops its sum."""
    signs = {"fetch": "+", "evict": "-", "check": "?"}
    other = {"add": "{0.key}>{0.position}", "measure": "{0.position}", "drop": "~{0.position}"}
    return " ".join(
        other[s.kind].format(s) if s.kind in other else signs[s.kind] + s.key for s in steps
    )


def schedule(needs: Sequence[str], budget: int | None, **more: SumSize) -> DownloadSchedule:
    """Return a schedule of contents of one byte, whose sums take two and end as one."""
    sums = {p: SumSize(tuple(keys), 2, 1) for p, keys in enumerate(needs) if len(keys) > 1}
    sums |= {int(name[1:]): one for name, one in more.items()}
    return DownloadSchedule(
        tuple(map(tuple, needs)), dict.fromkeys(KEYS, 1), budget=budget, sums=sums
    )


# ---------------------------------------------------------------------------------- invariants


@given(schedules())
def test_members_are_added_in_order_and_once_and_sums_are_measured_whole(
    schedule: DownloadSchedule,
) -> None:
    steps = schedule.steps(schedule.order)
    walked(schedule, steps)
    measured = [step.position for step in steps if step.kind == "measure"]
    assert sorted(measured) == list(range(len(schedule.needs)))
    assert tuple(measured) == schedule.order


@given(schedules())
def test_the_budget_holds_with_every_sum(schedule: DownloadSchedule) -> None:
    steps = schedule.steps(schedule.order)
    loads = walked(schedule, steps)
    first = next((k for k, step in enumerate(steps) if step.kind != "evict"), len(steps))
    if schedule.budget is not None:
        assert all(load <= schedule.budget for load in loads[first:])
    begun = total(schedule, set(schedule.present)) + sum(
        one.nbytes for one in schedule.summed.values()
    )
    assert schedule.peak_nbytes(steps) == max([begun, *loads])


@given(schedules())
def test_a_soup_whose_members_fit_is_measured_side_by_side(schedule: DownloadSchedule) -> None:
    for position, one in schedule.summed.items():
        needed = sum(map(schedule.weight, schedule.needs[position]))
        fits = schedule.budget is None or needed <= schedule.budget
        assert not fits or (one.begun and not one.missing)


@given(schedules())
def test_whoever_goes_on_from_any_step_ends_the_same(schedule: DownloadSchedule) -> None:
    """A schedule broken off behind a step: what is left of it, with what lies there, is walked."""
    order = schedule.order
    steps = schedule.steps(order)
    for end in range(0, len(steps), 5):
        there, added, over = set(schedule.present), dict[int, int](), set[int]()
        for step in steps[:end]:
            if step.kind == "fetch":
                there.add(step.key)
            elif step.kind == "evict":
                there.discard(step.key)
            elif step.kind == "add":
                added[step.position] = added.get(step.position, 0) + 1
            elif step.kind == "measure":
                over.add(step.position)
        sums = {
            p: replace(one, begun=True, added=one.added + added[p]) if p in added else one
            for p, one in schedule.sums.items()
        }
        left = replace(schedule, present=frozenset(there), sums=sums)
        rest = [p for p in order if p not in over]
        again = left.steps(rest)
        gone = {p: one for p, one in left.sums.items() if p not in over}
        walked(replace(left, sums=gone), again)


# -------------------------------------------------------------------------------------- shapes


def test_members_are_added_while_they_are_measured_and_fetched_once() -> None:
    large = schedule(["a", "b", "c", "d", "abcd"], 3)
    steps = large.steps(large.order)
    assert words(steps) == ("+a a>4 0 -a +b b>4 1 -b +c c>4 2 -c +d d>4 3 -d 4 ~4")
    assert large.peak_nbytes(steps) == 3


def test_with_room_for_one_more_the_next_one_comes_while_one_is_measured() -> None:
    large = schedule(["a", "b", "c", "d", "e", "abcde"], 4)
    assert words(large.steps(large.order)).startswith("+a a>5 +b 0 -a b>5 +c 1 -b")


def test_members_that_nobody_measures_come_for_the_sum_alone() -> None:
    large = schedule(["abcd", "e"], 3)
    assert words(large.steps(large.order)) == (
        "+a a>0 -a +b b>0 -b +c c>0 -c +d d>0 -d +e 0 ~0 1 -e"
    )


def test_a_soup_before_its_members_is_moved_behind_them() -> None:
    large = schedule(["abcd", "a", "b", "c", "d"], 3)
    steps = large.steps(large.order)
    assert large.fetched_nbytes(steps) == 4


def test_two_sums_grow_together_where_there_is_room_and_else_one_after_another() -> None:
    both, one = (schedule(["abcdef", "abcdef"], budget) for budget in (5, 4))
    assert both.fetched_nbytes(both.steps(both.order)) == 6
    steps = one.steps(one.order)
    assert one.fetched_nbytes(steps) <= 12
    walked(one, steps)


def test_members_in_another_order_than_the_run_are_fetched_again_where_they_have_to_be() -> None:
    large = schedule(["a", "b", "c", "d", "dabc"], 3)
    steps = large.steps(large.order)
    assert [s.key for s in steps if s.kind == "add"] == list("dabc")
    assert large.fetched_nbytes(steps) <= 7


def test_a_sum_that_was_begun_goes_on_where_it_ended() -> None:
    large = schedule(["abcd"], 3, _0=SumSize(tuple("abcd"), 2, 1, begun=True, added=3)).settled()
    assert words(large.steps(large.order)) == "+d d>0 -d 0 ~0"


def test_a_whole_sum_is_measured_and_nothing_is_fetched() -> None:
    large = schedule(["abcd"], 3, _0=SumSize(tuple("abcd"), 2, 1, begun=True, added=4)).settled()
    assert words(large.steps(large.order)) == "0 ~0"


def test_a_sum_that_stands_in_the_way_of_another_is_begun_anew() -> None:
    begun = SumSize(tuple("abcd"), 2, 1, begun=True, added=1)
    large = replace(
        schedule(["ef", "abcd"], 3, _1=begun), nbytes={**dict.fromkeys("abcd", 1), "e": 3, "f": 0}
    )
    settled = large.settled()
    assert not settled.sums[1].begun
    walked(settled, settled.steps(settled.order))


def test_a_sum_of_no_use_any_more_is_left() -> None:
    begun = SumSize(tuple("ab"), 2, 1, begun=True, added=1)
    for budget in (None, 2, 9):
        assert not schedule(["ab"], budget, _0=begun).settled().sums[0].begun


def test_a_budget_below_one_member_and_the_sum_is_refused() -> None:
    with pytest.raises(MachineError, match="needs 3 bytes of weights"):
        schedule(["abcd"], 2).settled()
