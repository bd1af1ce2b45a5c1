"""Accuracy on tasks, and quantities of rollouts.

Each answer is marked, and each scheme paired with full precision. Rollouts show where greedy
answers change, when answers end, and what they would score; their unit is the prompt. A quantity
that is not measured is None, or the reason why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qaudit.core import items as paired
from qaudit.core import statistics
from qaudit.core.items import ExpectedScore, Marked, expected_score
from qaudit.core.statistics import Array
from qaudit.judge.table import EvidenceFiles, Measurements
from qaudit.types import (
    FULL_PRECISION,
    ImportedAnswers,
    Interval,
    Measurement,
    RolloutEvidence,
    Subject,
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
    options = _Options(task)
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


class _Options:
    """Where the options of each of I items are among P options."""

    def __init__(self, task: TaskEvidence) -> None:
        self.items_I, self.starts_I = np.unique(task.items, return_index=True)
        self.sizes_I = np.diff(self.starts_I, append=len(task.items))
        self.place_P = np.repeat(np.arange(len(self.items_I)), self.sizes_I)


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
    level, yardstick = table.confidence, table.full(reference) if reference else None
    for measured in table.first_draws.measurements:
        full = None if measured.scheme == FULL_PRECISION else table.full(measured.subject)
        tasks, theirs = tasks_of(measured), tasks_of(full)
        for name in (*tasks, MEAN) if len(tasks) > 1 else tasks:
            columns: dict[str, Any] = {"accuracy_drop": None}
            if pairs := marked(measured, full, name):
                columns = {
                    "accuracy_drop": paired.drop(pairs, level, normalized=True),
                    "drop": paired.drop(pairs, level, normalized=False),
                    "flips": paired.flips(pairs, level).estimate,
                    "right_to_wrong": sum(pair.lost for pair in pairs),
                    "wrong_to_right": sum(pair.won for pair in pairs),
                }
            if (task := tasks.get(name)) is None:
                rights = [answers(each).right_N for each in tasks.values()]
                columns["accuracy"] = paired.mean_accuracy(rights, level)
            else:
                rights = [answers(task).right_N]
                columns["accuracy"] = statistics.accuracy(rights[0], level)
                path, sha256 = (files or {}).get((measured.subject, measured.spec, name), ("", ""))
                columns |= {"evidence": path, "evidence_sha256": sha256}
                columns["imported"] = task.imported.about if task.imported else ""
                columns |= _changes(task, theirs[name], pairs[0], level) if pairs else {}
            if yardstick is not None and measured is not yardstick:
                pairs = marked(measured, yardstick, name) or ()
                if pairs and all(len(p.right_N) == len(p.full_N) for p in pairs):
                    columns["reference_drop"] = paired.drop(pairs, level, normalized=False)
                    columns["reference_flips"] = paired.flips(pairs, level).estimate
            yield TaskRow(
                subject=measured.subject,
                scheme=measured.scheme,
                spec=measured.spec,
                task=name,
                items=sum(map(len, rights)),
                **columns,
            )


def _changes(task: TaskEvidence, full: TaskEvidence, pair: Marked, level: float) -> dict[str, Any]:
    """Return what changed against full precision on the items of one task."""
    picks = np.stack([answers(each).picked_N for each in (task, full)])
    is_unknown = task.imported and (picks < 0).any()
    return {
        "changed_answers": None if is_unknown else int((picks[0] != picks[1]).sum()),
        "margin_factor": paired.margin_factor(margin_ratios(task, full), level),
        "p_value": paired.mcnemar(pair.lost, pair.won),
    }


def margin_ratios(one: TaskEvidence, full: TaskEvidence) -> npt.NDArray[np.float64]:
    """Return, for each item, the margin of full precision's answer under a scheme over its own.

    The margin is the score of that option minus the best other one: below zero where the answer
    changed. Items with one option, or where two options are equal, have none.
    """
    if not len(full.items) or len(one.nll) != len(full.nll) or full.imported:
        return np.array([])
    options = _Options(full)
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


TURN, REASONING = "turn", "reasoning"
_CERTAIN, _SLIGHT = 0.999, 0.01  # a part of the entropy, which arithmetic alone may move


def places_of_divergence(evidence: RolloutEvidence) -> Array:
    """Return the first token of each prompt's greedy rollout that is another, counted from 1.

    Infinite where the stream writes the whole rollout; nothing where all are sampled.
    """
    greedy = np.flatnonzero(evidence.agreed >= 0)
    _, first = np.unique(evidence.prompt[greedy], return_index=True)
    agreed = evidence.agreed[greedy[first]]
    places: Array = np.where(agreed == evidence.tokens[greedy[first]], np.inf, agreed + 1.0)
    return places


def tokens_to_divergence(evidence: RolloutEvidence, confidence: float) -> Interval | None:
    """Return the median place; infinite where most rollouts never diverge."""
    places = places_of_divergence(evidence)
    if not len(places):
        return None
    return statistics.within(statistics.median(places, confidence), 1.0, np.inf)


def change_of_end(
    evidence: RolloutEvidence, full: RolloutEvidence | None, name: str, confidence: float
) -> Interval | None:
    if full is None or name not in evidence.end_names or full.sha256 != evidence.sha256:
        return None
    group = evidence.end_names.index(name)
    _, place_S = np.unique(evidence.prompt, return_inverse=True)
    sums = (np.bincount(place_S, part.end_sum[:, group]) for part in (evidence, full))
    interval = statistics.interval(tuple(sums), statistics.excess, confidence)
    return statistics.within(interval, -1.0, np.inf)  # no probability is below 0


def answer_length(
    evidence: RolloutEvidence, full: RolloutEvidence, confidence: float
) -> Interval | None:
    """Return by how much the probability of ending a turn changes, up or down."""
    change = change_of_end(evidence, full, TURN, confidence)
    if change is None:
        return None
    bounds = sorted((abs(change.low), abs(change.high)))
    low = 0.0 if change.low <= 0 <= change.high else bounds[0]
    return Interval(abs(change.estimate), low, bounds[1])


def weighed(
    evidence: RolloutEvidence, full: RolloutEvidence | None, subject: Subject, confidence: float
) -> ExpectedScore | str:
    """Return what a stream's answers would score, or why that is not said."""
    if evidence.mark is None:
        return "no rollout has a mark"
    if evidence.drawn_sum is None or full is None or full.drawn_sum is None:
        return evidence.unweighed or "full precision was not measured"
    if evidence.weights_sha256 != subject.content:
        return f"they are answers of other weights than those of `{subject.label}`"
    marked = ~np.isnan(evidence.mark)
    if reason := _written_by_others(full, marked):
        return reason
    log_weights = evidence.drawn_sum[marked] - full.drawn_sum[marked]
    return expected_score(evidence.mark[marked], log_weights, evidence.prompt[marked], confidence)


def _written_by_others(full: RolloutEvidence, marked: npt.NDArray[np.bool_]) -> str:
    """Return why full precision cannot have drawn these answers, or ''.

    The hash of a folder tells whose weights were meant; a server may hold others. What was drawn
    from a distribution surprises it, -log p, by its entropy on average, token for token.
    """
    if full.drawn_sum is None or full.entropy_sum is None:
        return ""  # measured before it was recorded
    _, place_S = np.unique(full.prompt[marked], return_inverse=True)
    surprise_D = np.bincount(place_S, -full.drawn_sum[marked])
    entropy_D = np.bincount(place_S, full.entropy_sum[marked])
    change = statistics.interval((surprise_D, entropy_D), statistics.excess, _CERTAIN)
    if abs(change.estimate) <= _SLIGHT or change.low <= 0 <= change.high:
        return ""
    more = "more" if change.estimate > 0 else "less"
    return (
        f"full precision would be surprised {abs(change.estimate):.0%} {more} by these answers "
        "than by its own: other weights wrote them, or another sampler"
    )


Quantity = Callable[[RolloutEvidence, RolloutEvidence, Subject, float], Interval | str]
"""Of a stream and of full precision of a subject, at a confidence."""


def _drop(
    evidence: RolloutEvidence, full: RolloutEvidence, subject: Subject, confidence: float
) -> Interval | str:
    result = weighed(evidence, full, subject, confidence)
    if isinstance(result, str) or (change := result.change) is None:
        return result if isinstance(result, str) else result.reason
    return Interval(-change.estimate, -change.high, -change.low)


QUANTITIES: Mapping[str, Quantity] = {
    "tokens_to_divergence": lambda evidence, full, subject, confidence: (
        tokens_to_divergence(evidence, confidence) or "the rollouts are sampled, none is greedy"
    ),
    "answer_length": lambda evidence, full, subject, confidence: (
        answer_length(evidence, full, confidence) or "no token is known to end a turn"
    ),
    "expected_drop": _drop,
}
"""The metrics of rollouts, by the name of their statistic."""
