"""Weights come and go within the budget, and no byte comes twice without need."""

from functools import cache
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.downloads.downloads import DownloadSchedule

KEYS = "abcde"


def total(schedule, keys):
    return sum(schedule.nbytes[key] for key in keys)


@st.composite
def schedules(draw, subjects=7, one_size=False):
    """Draw a schedule whose budget holds each subject alone, or that has no budget."""
    keys = st.lists(st.sampled_from(KEYS), max_size=3, unique=True)
    needs = tuple(tuple(k) for k in draw(st.lists(keys, max_size=subjects)))
    sizes = st.just(1) if one_size else st.integers(0, 9)
    nbytes = {key: draw(sizes) for key in KEYS}
    cached = draw(st.frozensets(st.sampled_from(KEYS), max_size=2))
    present = draw(st.frozensets(st.sampled_from(KEYS), max_size=2)) - cached
    least = max((sum(nbytes[k] for k in n if k not in cached) for n in needs), default=0)
    more = draw(st.none() | st.integers(0, 12))
    budget = None if more is None else least + more
    return DownloadSchedule(needs, nbytes, cached, present, budget)


def walked(schedule, steps):
    """Walk the steps and return what is there after each; fail on a step that is useless."""
    there, checked, states = set(schedule.present), set(), []
    for step in steps:
        if step.kind == "fetch":
            assert step.key not in there | schedule.cached
            there.add(step.key)
            checked.add(step.key)
        elif step.kind == "check":
            assert step.key in there | schedule.cached
            assert step.key not in checked
            checked.add(step.key)
        elif step.kind == "evict":
            assert step.key in there
            there.remove(step.key)
            checked.discard(step.key)
        else:
            assert set(schedule.needs[step.position]) <= checked
            assert set(schedule.needs[step.position]) <= there | schedule.cached
        states.append(set(there))
    return states


def cheapest(schedule, order):
    """Try every choice of what stays behind each subject: the fewest bytes there can be."""

    @cache
    def rest(turn, there):
        if turn == len(order):
            return 0
        needed = set(schedule.needs[order[turn]]) - schedule.cached
        best = float("inf")
        for stays in subsets(there):
            held = stays | needed
            if schedule.budget is None or total(schedule, held) <= schedule.budget:
                cost = total(schedule, needed - stays) + rest(turn + 1, frozenset(held))
                best = min(best, cost)
        return best

    return int(rest(0, schedule.present))


def subsets(keys):
    every = (combinations(sorted(keys), count) for count in range(len(keys) + 1))
    return chain.from_iterable(map(frozenset, some) for some in every)


def itinerary(needs, budget, *, cached="", present=""):
    """Return the steps for contents of one size."""
    nbytes = dict.fromkeys((*KEYS, *"xyz"), 1)
    contents = tuple(map(tuple, needs)), nbytes, frozenset(cached), frozenset(present)
    schedule = DownloadSchedule(*contents, budget)
    return schedule.steps(schedule.order)


def words(steps):
    """Print steps in short: `+a` comes, `-a` goes, `?a` is checked, `0` is measured."""
    signs = {"fetch": "+", "evict": "-", "check": "?", "measure": ""}
    return " ".join(
        signs[s.kind] + (str(s.position) if s.kind == "measure" else s.key) for s in steps
    )


# ---------------------------------------------------------------------------------- invariants


@given(schedules())
def test_everything_is_there_when_it_is_measured(schedule):
    steps = schedule.steps(schedule.order)
    states = walked(schedule, steps)
    measured = [s.position for s in steps if s.kind == "measure"]
    assert sorted(measured) == list(range(len(schedule.needs)))
    assert tuple(measured) == schedule.order
    assert schedule.peak_nbytes(steps) == max(
        [total(schedule, set(schedule.present)), *(total(schedule, there) for there in states)]
    )
    missing = {key for keys in schedule.needs for key in keys} - schedule.cached - schedule.present
    assert schedule.fetched_nbytes(steps) >= total(schedule, missing)
    if schedule.budget is None:
        assert sorted(s.key for s in steps if s.kind == "fetch") == sorted(missing)
        assert all(s.kind != "evict" for s in steps)
    else:
        first = next((i for i, s in enumerate(steps) if s.kind != "evict"), len(steps))
        assert all(total(schedule, there) <= schedule.budget for there in states[first:])


@given(schedules())
def test_what_is_never_needed_again_goes_at_once(schedule):
    steps = schedule.steps(schedule.order)
    if schedule.budget is None:
        return
    for i, step in enumerate(steps):
        if step.kind == "measure":
            later = {
                k for s in steps[i + 1 :] if s.kind == "measure" for k in schedule.needs[s.position]
            }
            over = set(schedule.needs[step.position]) - later - schedule.cached
            following = next(
                (j for j in range(i + 1, len(steps)) if steps[j].kind != "evict"), None
            )
            assert over <= {s.key for s in steps[i + 1 : following]}
    assert not walked(schedule, steps) or walked(schedule, steps)[-1] == set()


@given(schedules(subjects=5))
def test_a_larger_budget_never_costs_more(schedule):
    one = dict.fromkeys(KEYS, 1)
    larger = [
        DownloadSchedule(schedule.needs, one, schedule.cached, schedule.present, budget)
        for budget in range(3, 7)
    ]
    costs = [t.fetched_nbytes(t.steps(t.order)) for t in larger]
    assert costs == sorted(costs, reverse=True)


# ------------------------------------------------------------------------------------- optimum


@given(schedules(subjects=6, one_size=True))
def test_for_contents_of_one_size_nothing_fetches_less(schedule):
    order = tuple(range(len(schedule.needs)))
    assert schedule.fetched_nbytes(schedule.steps(order)) == cheapest(schedule, order)


@given(schedules(subjects=6))
def test_for_mixed_sizes_at_most_twice_what_could_be_is_fetched(schedule):
    order = tuple(range(len(schedule.needs)))
    best = cheapest(schedule, order)
    assert best <= schedule.fetched_nbytes(schedule.steps(order)) <= 2 * best


def test_a_series_with_a_soup_of_scattered_members_is_fetched_once():
    for budget in (3, 4, 5):
        steps = itinerary(["a", "x", "b", "y", "c", "z", "abc"], budget)
        assert sum(step.kind == "fetch" for step in steps) == 6


@pytest.mark.parametrize(
    ("needs", "budget", "more", "expected"),
    [
        ("a b c", 2, {}, "+a +b 0 -a +c 1 -b 2 -c"),  # one is fetched while one is measured
        ("a b", 1, {}, "+a 0 -a +b 1 -b"),
        ("a b c abc", None, {}, "+a +b 0 +c 1 2 3"),
        ("x ab", 2, {}, "+x +a 0 -x +b 1 -a -b"),  # members come as far as there is room
        # A soup is measured right behind its last member.
        ("a b c d ab", 2, {}, "+a +b 0 1 4 -a -b +c +d 2 -c 3 -d"),
        ("a b c ab", 3, {}, "+a +b 0 +c 1 3 -a -b 2 -c"),
        ("a b c ab", None, {}, "+a +b 0 +c 1 2 3"),
        # What is used last goes where room is needed.
        ("a b c a b", 2, {}, "+a +b 0 1 -b +c 2 -c +b 3 -a 4 -b"),
        ("- a -", 1, {}, "+a 0 1 -a 2"),  # of this machine
        ("", 1, {}, ""),
        # What is cached is checked ahead, never goes, and does not count against the budget.
        ("a b c", 1, {"cached": "ac"}, "?a +b 0 ?c 1 -b 2"),
        ("ab", 1, {"cached": "a"}, "?a +b 0 -b"),
        # What an earlier trip left counts, and goes when it is done.
        ("a b", 1, {"present": "az"}, "-z ?a 0 -a +b 1 -b"),
    ],
)
def test_steps_are_in_this_order(needs, budget, more, expected):
    listed = [names.strip("-") for names in needs.split()]
    assert words(itinerary(listed, budget, **more)) == expected
