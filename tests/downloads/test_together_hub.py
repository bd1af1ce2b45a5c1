"""What needs several checkpoints of the Hub on the disk at once: a search."""

from __future__ import annotations

import pytest

from qaudit.errors import MachineError
from qaudit.types import Checkpoint, Subject
from tests.support.shelf import STEPS, Place, alone, place, plan_of, shelf

__all__ = ["place", "shelf"]  # fixtures

THREE = STEPS[:3]
GONE = "RevisionNotFound"


def three(place: Place) -> list[Checkpoint]:
    return place.checkpoints(*(f"org/series@{step}" for step in THREE))


def search(*candidates: Checkpoint) -> Subject:
    parts = tuple((c, 1 / len(candidates)) for c in candidates)
    return Subject("best", parts, "greedy:scheme=rtn-4bit")


def content(checkpoints: list[Checkpoint]) -> int:
    return sum(c.nbytes for c in checkpoints)


def test_candidates_lie_on_the_disk_together_and_come_once(place: Place) -> None:
    series, names = three(place), place.weights(*THREE)
    most: list[int] = []
    place.watch.look = lambda: most.append(place.nbytes_of_weights(names))
    plan = plan_of([*map(alone, series), search(*series)], place)
    audit = place.run(plan, budget=content(series))
    assert audit.diagnostics.greedy[0].documents == 8
    assert len(place.fetched(names)) == len(names)
    assert max(most) <= content(series)
    assert not place.nbytes_of_weights(names)


def test_a_search_that_ended_is_gone_through_again_without_a_weight(place: Place) -> None:
    series, names = three(place), place.weights(*THREE)
    plan = plan_of([*map(alone, series), search(*series)], place)
    first = place.run(plan, budget=content(series))
    count = len(place.fetched(names))
    again = place.run(plan, budget=content(series))
    assert again.diagnostics == first.diagnostics
    assert len(place.fetched(names)) == count


def test_candidates_that_do_not_fit_together_are_refused_with_what_would(place: Place) -> None:
    series = three(place)
    plan = plan_of([*map(alone, series), search(*series)], place)
    with pytest.raises(MachineError, match="`best` needs") as refused:
        place.run(plan, budget=content(series[:2]))
    assert "disk_budget=" in refused.value.hint
