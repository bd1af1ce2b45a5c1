"""Accuracy of two audits on the same tasks: paired where both answered the same items."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from qaudit.core import items, statistics
from qaudit.core.items import Marked
from qaudit.core.statistics import MINIMUM_DOCUMENTS
from qaudit.judge.table import Cell
from qaudit.judge.tasks import answers, same_items, tasks_of
from qaudit.types import Interval, Measurement, Reading, TaskDelta, TaskEvidence

Pairs = list[tuple[Cell, TaskEvidence, TaskEvidence]]


def shared_tasks(pairs: list[tuple[Cell, Measurement, Measurement]]) -> Pairs:
    shared: Pairs = []
    for cell, a, b in pairs:
        theirs = tasks_of(b)
        shared += [(cell, one, theirs[name]) for name, one in tasks_of(a).items() if name in theirs]
    return shared


def task_deltas(shared: Pairs, level: float) -> Iterator[TaskDelta]:
    """Yield what accuracy lost from a to b; below zero it rose."""
    for (subject, scheme), a, b in shared:
        before, after = answers(a).right_N, answers(b).right_N
        paired = same_items(a, b)
        if paired:
            drop = items.drop([Marked(after, before)], level, normalized=False)
            assert drop is not None
        else:
            drop = apart(statistics.accuracy(before, level), statistics.accuracy(after, level))
        same = (
            paired
            and np.array_equal(a.nll, b.nll, equal_nan=a.imported is not None)
            and np.array_equal(before, after)
        )
        yield TaskDelta(
            subject, scheme, a.task, drop, reading(drop, len(after), same=same), paired, len(after)
        )


def apart(a: Interval, b: Interval) -> Interval:
    """Return a minus b of two independent estimates (Zou and Donner 2008)."""
    estimate = a.estimate - b.estimate
    below = math.hypot(a.estimate - a.low, b.high - b.estimate)
    above = math.hypot(a.high - a.estimate, b.estimate - b.low)
    return Interval(estimate, estimate - below, estimate + above)


def reading(worse: Interval, count: int, *, same: bool) -> Reading:
    """Put a difference into a word; a positive one is worse, and too few decide nothing."""
    if same:
        return "same"
    if count < MINIMUM_DOCUMENTS or not math.isfinite(worse.estimate):
        return "unclear"
    if worse.low > 0:
        return "worse"
    return "better" if worse.high < 0 else "unclear"
