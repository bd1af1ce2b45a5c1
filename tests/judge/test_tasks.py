"""Answers of options, their pairs, and what a policy makes of several tasks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qaudit.judge.diff import task_deltas
from qaudit.judge.tasks import answers, margin_ratios
from qaudit.types import TaskEvidence
from tests.support.items import items_of


def test_the_likeliest_option_is_the_answer_and_of_equal_ones_the_first() -> None:
    one = items_of(np.array([2.0, 1.0, 1.0, 3.0, 5.0, 4.0]), options=3, answer=1)
    found = answers(one)
    assert found.picked_N.tolist() == [1, 0]
    assert found.right_N.tolist() == [True, False]
    broken = answers(items_of(np.array([np.nan, 1.0, np.inf, np.inf, 2.0, 1.0]), options=2))
    assert broken.picked_N.tolist() == [-1, -1, 1]


def test_two_audits_are_paired_on_the_items_that_both_answered() -> None:
    a = items_of(np.tile([1.0, 2.0], 200), options=2, task="t")
    nll = np.tile([1.0, 2.0], (200, 1))
    nll[:40] = [2.0, 1.0]
    b = items_of(nll.ravel(), options=2, task="t")
    fewer = items_of(np.tile([1.0, 2.0], 100), options=2, task="t")
    cell = ("s", "gptq-4bit")
    worse, same, apart = task_deltas([(cell, a, b), (cell, a, a), (cell, b, fewer)], 0.95)
    assert (worse.reading, worse.paired, worse.drop.estimate) == ("worse", True, 0.2)
    assert (same.reading, same.drop.estimate) == ("same", 0.0)
    assert (apart.paired, apart.reading) == (False, "better")
    assert worse.drop.high - worse.drop.low < apart.drop.high - apart.drop.low


LOSSES = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.5, np.inf, -np.inf, np.nan])


@st.composite
def task_pairs(draw: st.DrawFn) -> tuple[TaskEvidence, TaskEvidence]:
    """Draw the same items under full precision and under a scheme; some items have no option."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=6))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    losses = st.lists(LOSSES, min_size=len(owner), max_size=len(owner))
    marks = st.lists(st.booleans(), min_size=len(owner), max_size=len(owner))
    right, greedy = (np.array(draw(marks), dtype=np.bool_) for _ in range(2))
    first, second = (
        TaskEvidence("t", np.array(draw(losses)), owner, right, greedy) for _ in range(2)
    )
    return first, second


@given(task_pairs())
def test_answers_are_those_of_a_loop_over_items(pair: tuple[TaskEvidence, TaskEvidence]) -> None:
    full, other = pair
    count = int(full.items.max(initial=-1)) + 1
    options = [np.flatnonzero(full.items == item) for item in range(count)]
    marked = answers(full)
    ratios = []
    for item, places in enumerate(options):
        before, after = full.nll[places], other.nll[places]
        picked, right = -1, False
        if len(places) == 1:
            picked, right = 0, bool(full.greedy[places[0]])
        elif not np.isnan(before).any() and np.isfinite(before).any():
            picked = int(np.argmin(before))
            right = bool(full.right[places[picked]])
        assert (marked.picked_N[item], marked.right_N[item]) == (picked, right)
        if len(places) > 1 and np.isfinite(before).all() and np.isfinite(after).all():
            margin = np.delete(before, picked).min() - before[picked]
            if margin > 0:
                ratios.append((np.delete(after, picked).min() - after[picked]) / margin)
    assert margin_ratios(other, full).tolist() == ratios
