"""Accuracy on tasks: each answer marked, and each scheme paired with full precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qaudit.core import items as paired
from qaudit.core import statistics
from qaudit.core.items import Marked
from qaudit.judge.table import EvidenceFiles, Measurements
from qaudit.types import (
    FULL_PRECISION,
    ImportedAnswers,
    Interval,
    Measurement,
    TaskEvidence,
    TaskRow,
)

MEAN = "mean"
"""The row of the unweighted mean over tasks, where there are several."""


@dataclass(frozen=True, eq=False)
class Answers:
    """What a stream answers to the items of a task."""

    picked_N: npt.NDArray[np.int64]  # the option, counted from zero; -1: none, losses are NaN
    right_N: npt.NDArray[np.bool_]


def answers(task: TaskEvidence) -> Answers:
    """Mark the answers; the likeliest option is picked, of equal ones the first."""
    count = int(task.items.max(initial=-1)) + 1
    picked_N = np.full(count, -1, dtype=np.int64)
    right_N = np.zeros(count, dtype=np.bool_)
    if not count:
        return Answers(picked_N, right_N)
    if task.imported is not None:
        return Answers(task.imported.picked_N, task.greedy)
    options = _Options.of(task)
    lowest_I = np.minimum.reduceat(task.nll, options.starts_I)  # NaN where any option is
    finite_I = np.logical_or.reduceat(np.isfinite(task.nll), options.starts_I)
    lowest_I[~finite_I] = np.nan
    likeliest = np.flatnonzero(task.nll == lowest_I[options.place_P])
    place_K, first_K = np.unique(options.place_P[likeliest], return_index=True)
    picked_K = likeliest[first_K]
    picked_N[options.items_I[place_K]] = picked_K - options.starts_I[place_K]
    right_N[options.items_I[place_K]] = task.right[picked_K]
    # One continuation: right where each of its tokens is the likeliest.
    single_I = options.sizes_I == 1
    picked_N[options.items_I[single_I]] = 0
    right_N[options.items_I[single_I]] = task.greedy[options.starts_I[single_I]]
    return Answers(picked_N, right_N)


@dataclass(frozen=True, eq=False)
class _Options:
    """Where the options of each of I items are among P options."""

    items_I: npt.NDArray[np.int64]
    starts_I: npt.NDArray[np.int64]
    sizes_I: npt.NDArray[np.int64]
    place_P: npt.NDArray[np.int64]

    @classmethod
    def of(cls, task: TaskEvidence) -> _Options:
        items_I, starts_I = np.unique(task.items, return_index=True)
        sizes_I = np.diff(starts_I, append=len(task.items))
        return cls(items_I, starts_I, sizes_I, np.repeat(np.arange(len(items_I)), sizes_I))


def tasks_of(measured: Measurement | None) -> dict[str, TaskEvidence]:
    return {task.task: task for task in measured.evidence.tasks} if measured else {}


def same_items(a: TaskEvidence, b: TaskEvidence) -> bool:
    """Return whether both are marked by the same options of the same items."""
    return (
        np.array_equal(a.items, b.items)
        and np.array_equal(a.right, b.right)
        and _kind(a.imported) == _kind(b.imported)
    )


def _kind(imported: ImportedAnswers | None) -> tuple[str, str] | None:
    return (imported.about, imported.items_sha256) if imported else None


def marked(
    measured: Measurement | None, full: Measurement | None, task: str
) -> tuple[Marked, ...] | None:
    """Return the marks of a task, or of all tasks for the mean; None where there are none."""
    own, theirs = tasks_of(measured), tasks_of(full)
    names = [name for name in own if name in theirs] if task == MEAN else [task]
    if not names or any(name not in own or name not in theirs for name in names):
        return None
    if not all(same_items(own[name], theirs[name]) for name in names):
        return None
    return tuple(
        Marked(answers(own[name]).right_N, answers(theirs[name]).right_N) for name in names
    )


def score_tasks(
    table: Measurements, files: EvidenceFiles | None = None, reference: str | None = None
) -> Iterator[TaskRow]:
    """Yield accuracy and its drop for every subject, scheme and task; of draws for the first."""
    files = files or {}
    yardstick = table.full(reference) if reference else None
    for measured in table.measurements:
        if measured is not table.find(measured.subject, measured.scheme):
            continue
        full = None if measured.scheme == FULL_PRECISION else table.full(measured.subject)
        theirs = tasks_of(full)
        rows = [
            _row(measured, task, theirs.get(name), table.confidence, files)
            for name, task in tasks_of(measured).items()
        ]
        if len(rows) > 1:
            rights = [answers(task).right_N for task in tasks_of(measured).values()]
            row = TaskRow(
                subject=measured.subject,
                scheme=measured.scheme,
                spec=measured.spec,
                task=MEAN,
                accuracy=paired.mean_accuracy(rights, table.confidence),
                accuracy_drop=None,
                items=sum(map(len, rights)),
            )
            pairs = marked(measured, full, MEAN)
            rows.append(_with_changes(row, pairs, table.confidence) if pairs else row)
        if yardstick is not None and measured is not yardstick:
            rows = [_with_reference(row, measured, yardstick, table.confidence) for row in rows]
        yield from rows


def _row(
    measured: Measurement,
    one: TaskEvidence,
    full: TaskEvidence | None,
    confidence: float,
    files: EvidenceFiles,
) -> TaskRow:
    marks = answers(one)
    path, sha256 = files.get((measured.subject, measured.spec, one.task), ("", ""))
    row = TaskRow(
        subject=measured.subject,
        scheme=measured.scheme,
        spec=measured.spec,
        task=one.task,
        accuracy=statistics.accuracy(marks.right_N, confidence),
        accuracy_drop=None,
        items=len(marks.right_N),
        evidence=path,
        evidence_sha256=sha256,
        imported=one.imported.about if one.imported else "",
    )
    if full is None or not same_items(one, full):
        return row
    theirs = answers(full)
    pair = Marked(marks.right_N, theirs.right_N)
    picks = np.stack([marks.picked_N, theirs.picked_N])
    return _with_changes(
        row,
        [pair],
        confidence,
        changed=None if one.imported and (picks < 0).any() else int((picks[0] != picks[1]).sum()),
        margin_factor=paired.margin_factor(margin_ratios(one, full), confidence),
        p_value=paired.mcnemar(pair.lost, pair.won),
    )


def _with_reference(
    row: TaskRow, measured: Measurement, yardstick: Measurement, confidence: float
) -> TaskRow:
    pairs = marked(measured, yardstick, row.task)
    if pairs is None or any(len(p.right_N) != len(p.full_N) for p in pairs):
        return row
    return replace(
        row,
        reference_drop=paired.drop(pairs, confidence, normalized=False),
        reference_flips=paired.flips(pairs, confidence).estimate,
    )


def _with_changes(
    row: TaskRow,
    pairs: Sequence[Marked],
    confidence: float,
    *,
    changed: int | None = None,
    margin_factor: Interval | None = None,
    p_value: float | None = None,
) -> TaskRow:
    return replace(
        row,
        accuracy_drop=paired.drop(pairs, confidence, normalized=True),
        drop=paired.drop(pairs, confidence, normalized=False),
        flips=paired.flips(pairs, confidence).estimate,
        right_to_wrong=sum(pair.lost for pair in pairs),
        wrong_to_right=sum(pair.won for pair in pairs),
        changed_answers=changed,
        p_value=p_value,
        margin_factor=margin_factor,
    )


def margin_ratios(one: TaskEvidence, full: TaskEvidence) -> npt.NDArray[np.float64]:
    """Return, for each item, the margin of full precision's answer under a scheme over its own.

    The margin is the score of that option minus the best other one: below zero where the answer
    changed. Items with one option, or where two options are equal, have none.
    """
    if not len(full.items) or len(one.nll) != len(full.nll) or full.imported:
        return np.array([])
    options = _Options.of(full)
    finite_P = np.isfinite(full.nll) & np.isfinite(one.nll)
    usable_I = (options.sizes_I > 1) & np.logical_and.reduceat(finite_P, options.starts_I)
    picked_I = options.starts_I + np.maximum(answers(full).picked_N[options.items_I], 0)
    before_I, after_I = (_margins(task.nll, picked_I, options.starts_I) for task in (full, one))
    usable_I &= before_I > 0
    return after_I[usable_I] / before_I[usable_I]


def _margins(
    nll_P: npt.NDArray[np.float64], picked_I: npt.NDArray[np.int64], starts_I: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return by how much the best of the other options is behind the one that was picked."""
    others_P = nll_P.copy()
    others_P[picked_I] = np.inf
    with np.errstate(invalid="ignore"):  # items that are not usable: infinity minus infinity
        return np.minimum.reduceat(others_P, starts_I) - nll_P[picked_I]
