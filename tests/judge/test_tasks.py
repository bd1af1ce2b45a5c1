"""Answers of options, their pairs, and what a policy makes of several tasks."""

from __future__ import annotations

import numpy as np
import pytest

from qaudit.judge.task_changes import task_deltas
from qaudit.judge.tasks import answers, margin_ratios
from qaudit.types import TaskEvidence
from tests.support.items import items_of


def test_the_likeliest_option_is_the_answer_and_of_equal_ones_the_first() -> None:
    one = items_of(np.array([2.0, 1.0, 1.0, 3.0, 5.0, 4.0]), options=3, answer=1)
    found = answers(one)
    assert found.picked_N.tolist() == [1, 0]
    assert found.right_N.tolist() == [True, False]


def test_several_options_may_be_right_and_items_differ_in_their_number() -> None:
    nll, owner = np.array([3.0, 2.0, 9.0, 1.0, 7.0]), np.array([0, 0, 0, 1, 1])
    right = np.array([True, True, False, False, True])
    found = answers(TaskEvidence("t", nll, owner, right, np.zeros(5, np.bool_)))
    assert found.right_N.tolist() == [True, False]


def test_a_single_continuation_is_right_where_each_of_its_tokens_is_the_likeliest() -> None:
    greedy = np.array([True, False])
    one = TaskEvidence("lambada", np.ones(2), np.arange(2), np.ones(2, np.bool_), greedy)
    assert answers(one).right_N.tolist() == [True, False]


def test_losses_that_are_not_numbers_answer_nothing() -> None:
    found = answers(items_of(np.array([np.nan, 1.0, np.inf, 1.0]), options=2, answer=1))
    assert found.picked_N.tolist() == [-1, 1]
    assert found.right_N.tolist() == [False, True]


def test_margins_are_those_of_full_precisions_answer() -> None:
    full = items_of(np.array([1.0, 3.0, 1.0, 2.0]), options=2)
    half = items_of(np.array([1.0, 2.0, 2.0, 1.0]), options=2)
    assert margin_ratios(half, full) == pytest.approx([0.5, -1.0])


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
