"""One check for each question: an interval against a margin, or why there is none.

Three outcomes by the interval: wholly within the margin passes, wholly beyond it fails, and any
other is inconclusive, with the number of documents that would decide. Fewer documents than the
policy requires keep a check from passing, and hide no failure. A loss that is not finite is a
breach.

The end of an interval that has to be within the margin pays for choosing, where what is judged was
chosen on these documents; the other end, by which a check fails, does not (`Levels`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from qaudit.core import items as paired
from qaudit.core import statistics
from qaudit.core.statistics import (
    Statistic,
    documents_to_decide,
    items_to_detect,
    quantile_interval,
)
from qaudit.judge.gate.audits import SHIPS
from qaudit.judge.gate.questions import SUMS, Question
from qaudit.judge.gate.sentences import bound_of, sentence
from qaudit.judge.pooling import Deciding, deciding, interval_of, settling
from qaudit.judge.rollouts import QUANTITIES
from qaudit.judge.strata import worst_stratum
from qaudit.judge.table import Cell, is_finite
from qaudit.judge.tasks import MEAN, marked, tasks_of
from qaudit.types import FULL_PRECISION, Check, Interval, Policy, RolloutEvidence

_MORE_PROMPTS = "write rollouts of more prompts with `qaudit rollouts`"


class Levels(NamedTuple):
    """The confidence of the lower and of the upper end of an interval."""

    low: float
    high: float


def _sided(levels: Levels, make: Callable[[float], Interval | None]) -> Interval | None:
    low, high = (make(level) for level in levels)
    return None if low is None or high is None else Interval(low.estimate, low.low, high.high)


@dataclass(frozen=True)
class _Answer:
    """An interval, the subject it compares with, and a hint on what would decide it."""

    interval: Interval
    against: str | None
    deciding: Callable[[], Deciding]


def answer(question: Question, policy: Policy, levels: Levels) -> Check:
    rule = question.rule
    check = Check(
        rule=question.record.code,
        name=rule.name,
        level=rule.level,
        metric=rule.metric,
        subject=question.subject,
        scheme=question.scheme,
        outcome="missing",
        message=question.absent,
        hint=question.hint,
        margin=rule.margin,
        unit=question.record.unit,
        line=rule.line,
        bit_class=question.bit_class,
    )
    if question.absent:
        return check
    check = replace(check, documents=_documents(question))
    for cell in question.own:
        if not all(is_finite(m) for m in question.table.draws(*cell)):
            return replace(
                check,
                outcome="fail",
                message=f"the loss of `{cell[0]}` under {cell[1]} is not finite",
                hint="measure it in float32, and look for outliers in its weights",
            )
    result = _answer_of(question, levels)
    if isinstance(result, str):
        return replace(check, message=result)
    return _judge(check, question, result, policy)


def _documents(question: Question) -> int:
    if question.columns:
        return question.table.documents
    measured, full = (question.table.find(*cell) for cell in question.own)
    if question.record.of_rollouts:
        return len(np.unique(_rollouts(question)[0].prompt))
    pairs = marked(measured, full, MEAN)
    return sum(len(pair.full_N) for pair in pairs or ())


def _judge(check: Check, question: Question, result: _Answer, policy: Policy) -> Check:
    outcome: Literal["pass", "fail", "inconclusive", "missing"]
    interval, margin, hint = result.interval, question.rule.margin, ""
    needed = Deciding("")
    passes, fails = question.record.reaches(interval, margin)
    least = least_documents(policy)
    if fails:
        outcome, hint = "fail", _advice(question, check)
    elif unbounded := _is_unbounded(question, interval):
        outcome, needed = "pass" if check.level == "warn" else "inconclusive", Deciding(unbounded)
    elif check.documents < least:
        outcome = "inconclusive"
        # The policy's number where the interval alone is conclusive.
        required = Deciding(f"the policy requires {least} documents", least)
        if question.record.of_rollouts:
            required = Deciding(f"the policy requires {least} prompts: {_MORE_PROMPTS}")
        needed = required if passes else result.deciding()
        needed = replace(needed, documents=max(needed.documents or 0, required.documents or 0))
    elif not passes:
        outcome, needed = "inconclusive", result.deciding()
    elif question.unmeasured:
        names = ", ".join(f"`{name}`" for name in question.unmeasured)
        outcome, hint = "missing", f"measure {names} of its members, too"
    else:
        outcome = "pass"
    return replace(
        check,
        outcome=outcome,
        message=sentence(question, interval, result.against),
        hint=hint or needed.hint,
        interval=interval,
        against=result.against,
        needed_documents=needed.documents,
    )


def _is_unbounded(question: Question, interval: Interval) -> str:
    """Return that tokens are too few to bound a tail, where nothing beyond the margin was seen."""
    margin, unit = question.rule.margin, question.record.unit
    if question.record.quantile is None or math.isfinite(interval.high):
        return ""
    seen = f"{interval.estimate:.2g} was seen, the margin is {bound_of(margin, unit)}"
    return f"too few tokens to bound the rarest; {seen}" if interval.estimate <= margin else ""


def _advice(question: Question, check: Check) -> str:
    """Return advice on a breach; of a rule that warns, the class may ship all the same."""
    if check.level == "warn":
        return f"accept it, or set `level: error` for the rule `{check.name}`"
    if SHIPS in question.rule.subjects and "qaudit pick" in question.record.hint:
        return "nothing that was measured does better: add schemes or checkpoints"
    return question.record.hint


def least_documents(policy: Policy) -> int:
    """Return the number of documents below which every check is inconclusive."""
    return max(policy.minimum_documents, statistics.MINIMUM_DOCUMENTS)


def _answer_of(question: Question, levels: Levels) -> _Answer | str:
    if question.record.of_rollouts:
        return _of_rollouts(question, levels)
    if not question.columns:
        return _of_tasks(question, levels)
    if question.rule.strata is not None:
        return _worst(question, levels)
    if question.record.quantile is not None:
        return _tail(question, question.record.quantile, levels)
    return _mean(question, levels)


def _worst(question: Question, levels: Levels) -> _Answer | str:
    """Return the interval of the worst stratum; those of all strata hold at once."""
    measure, (cell, *_) = question.rule.metric, question.columns[0]
    assert measure in ("relative_error", "absolute_change", "kl")
    low, high = (worst_stratum(question.table, cell, measure, level) for level in levels)
    if low is None or high is None:
        return f"no stratum of `{cell[0]}` has a `{measure}` that is finite"
    hint = f"the worst stratum has {low.documents} documents: evaluate on more of its kind"
    whole = Interval(low.interval.estimate, low.interval.low, high.interval.high)
    return _Answer(whole, low.stratum, lambda: Deciding(hint))


def _tail(question: Question, share: float, levels: Levels) -> _Answer:
    """Return the quantile over the tokens, documents being the clusters."""
    table, (cell, *_) = question.table, question.columns[0]
    measured = table.find(*cell)
    assert measured is not None
    assert measured.evidence.fidelity is not None
    counts = measured.evidence.fidelity.kl_counts[table.scored()]
    whole = _sided(levels, lambda level: quantile_interval(counts, share, level))
    assert whole is not None

    def needed() -> Deciding:
        if not math.isfinite(whole.high):
            return Deciding("too few tokens for the upper bound: evaluate on more documents")
        spread = statistics.spread_from(whole, table.documents, max(levels))
        error, margin = spread.standard_error, question.rule.margin
        count = documents_to_decide(whole, error, table.documents, margin)
        return deciding(count, table.documents)

    return _Answer(whole, None, needed)


def _mean(question: Question, levels: Levels) -> _Answer | str:
    """Return the largest interval of the columns: all hold at once, so the largest does."""
    table, record = question.table, question.record
    statistic: Statistic = getattr(statistics, record.statistic)
    sums = SUMS[record.sums]

    def interval(cells: tuple[Cell, ...]) -> Interval | None:
        return _sided(
            levels,
            lambda level: interval_of(table, cells, statistic, confidence=level, sums=sums),
        )

    results: list[tuple[Interval, str | None, tuple[Cell, ...]]] = []
    against: Sequence[str | None] = question.against or [None] * len(question.columns)
    for cells, other in zip(question.columns, against, strict=True):
        found = interval(cells)
        if found is not None:
            results.append((found, other, cells))
    if not results:
        return "what it is compared with has a loss that is not finite"
    whole = Interval(
        max(interval.estimate for interval, _, _ in results),
        max(interval.low for interval, _, _ in results),
        max(interval.high for interval, _, _ in results),
    )
    _, other, _ = max(results, key=lambda each: each[0].estimate)
    _, _, cells = max(results, key=lambda each: each[0].high)
    if not question.against and len(question.rivals) > FEW:
        whole = _at_least_as_wide(whole, question, interval)

    def needed() -> Deciding:
        margin = question.rule.margin
        return settling(table, cells, statistic, margin, whole, sums)

    return _Answer(whole, other, needed)


FEW = 4
"""Contenders, up to which the one that ships is bounded by its own documents alone."""


def _at_least_as_wide(
    whole: Interval, question: Question, interval: Callable[[tuple[Cell, ...]], Interval | None]
) -> Interval:
    """Let the upper end reach as far as the lower quartile of those of all contenders.

    The pick of many may look quiet by luck.
    """
    width = len(question.columns[0])
    rivals = (
        ((label, scheme), (label, FULL_PRECISION))[:width] for label, scheme in question.rivals
    )
    found = [each for each in map(interval, rivals) if each is not None]
    reaches = sorted(each.high - each.estimate for each in found)
    if not reaches:
        return whole
    least = reaches[min((len(question.rivals) - 1) // 4, len(reaches) - 1)]
    return replace(whole, high=max(whole.high, whole.estimate + least))


def _rollouts(question: Question) -> tuple[RolloutEvidence, RolloutEvidence]:
    found = (question.table.find(*cell) for cell in question.own)
    stream, full = (measured.evidence.rollouts for measured in found if measured is not None)
    assert stream is not None
    assert full is not None
    return stream, full


def _of_rollouts(question: Question, levels: Levels) -> _Answer | str:
    quantity = QUANTITIES[question.record.statistic]
    subject = next(s for s in question.table.subjects if s.label == question.subject)
    low, high = (quantity(*_rollouts(question), subject, level) for level in levels)
    if isinstance(low, str) or isinstance(high, str):
        return f"{question.record.compared} of `{question.subject}` was not measured: {low}"
    whole = Interval(low.estimate, low.low, high.high)
    return _Answer(whole, None, lambda: Deciding(_MORE_PROMPTS))


def _of_tasks(question: Question, levels: Levels) -> _Answer | str:
    """Return the interval of the mean over tasks, or of the worst: those of all hold at once."""
    measured, full = (question.table.find(*cell) for cell in question.own)
    rule = question.rule
    tasks = tuple(tasks_of(measured)) if rule.tasks else (MEAN,)
    levels = Levels(*(statistics.simultaneous(level, len(tasks)) for level in levels))
    results: list[tuple[Interval, str, int]] = []
    for task in tasks:
        pairs = marked(measured, full, task)
        if pairs is None:
            return f"no items of tasks were measured on `{question.subject}`"
        make = partial(getattr(paired, question.record.statistic), pairs)
        interval = _sided(levels, make)
        if interval is None:
            return f"`{question.subject}` answers all items of `{task}` in full precision"
        results.append((interval, task, sum(len(pair.full_N) for pair in pairs)))
    worst, task, items = max(results, key=lambda one: one[0].estimate)
    high = max(interval.high for interval, _, _ in results)
    whole = Interval(worst.estimate, max(interval.low for interval, _, _ in results), high)

    def needed() -> Deciding:
        count = items_to_detect(whole, items, rule.margin, max(levels))
        if count is None:
            return Deciding("more items may not decide it: the estimate is at the margin")
        imported = [task for task in tasks_of(measured).values() if task.imported]
        more = "import more" if imported else "raise `--set task_items=N`"
        return Deciding(f"needs about {count} items to decide; {items} were measured: {more}")

    return _Answer(whole, task if rule.tasks else None, needed)
