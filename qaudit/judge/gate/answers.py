"""One check for each question: an interval against a margin, or why there is none.

Three outcomes by the interval: wholly within the margin passes, wholly beyond it fails, and any
other is inconclusive, with the number of documents that would decide. With fewer documents than
the policy requires, every interval is inconclusive. A loss that is not finite is a breach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from qaudit.core import items as paired
from qaudit.core import statistics
from qaudit.core.histogram import quantile_interval
from qaudit.core.power import documents_to_decide, items_to_detect
from qaudit.core.statistics import Estimate, Statistic
from qaudit.judge.gate.audits import SHIPS
from qaudit.judge.gate.questions import SUMS, Question
from qaudit.judge.gate.sentences import sentence
from qaudit.judge.pooling import Deciding, deciding, estimated, settling
from qaudit.judge.rollouts import QUANTITIES
from qaudit.judge.strata import worst_stratum
from qaudit.judge.table import Cell, is_finite
from qaudit.judge.tasks import MEAN, marked, tasks_of
from qaudit.types import Check, Interval, Policy, RolloutEvidence

_MORE_PROMPTS = "write rollouts of more prompts with `qaudit rollouts`"


@dataclass(frozen=True)
class _Answer:
    """An interval, the subject it compares with, and a hint on what would decide it."""

    interval: Interval
    against: str | None
    deciding: Callable[[], Deciding]


def answer(question: Question, policy: Policy, confidence: float) -> Check:
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
    result = _answer_of(question, confidence)
    if isinstance(result, str):
        return replace(check, message=result)
    return _judge(check, question, result, policy)


def _documents(question: Question) -> int:
    if question.columns:
        return int(question.table.scored(question.split).sum())
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
    if check.documents < least:
        outcome = "inconclusive"
        # The policy's number where the interval alone is conclusive.
        required = Deciding(f"the policy requires {least} documents", _as_many(question, least))
        if question.record.of_rollouts:
            required = Deciding(f"the policy requires {least} prompts: {_MORE_PROMPTS}")
        needed = required if fails or passes else result.deciding()
        needed = replace(needed, documents=max(needed.documents or 0, required.documents or 0))
    elif fails:
        outcome, hint = "fail", _advice(question, check)
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
        message=sentence(question, interval, result.against, check.documents),
        hint=hint or needed.hint,
        interval=interval,
        against=result.against,
        needed_documents=needed.documents,
    )


def _as_many(question: Question, documents: int) -> int:
    judging = int(question.table.scored(question.split).sum())
    return math.ceil(documents * question.table.documents / max(1, judging))


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


def _answer_of(question: Question, confidence: float) -> _Answer | str:
    if question.record.of_rollouts:
        return _of_rollouts(question, confidence)
    if not question.columns:
        return _of_tasks(question, confidence)
    if question.rule.strata is not None:
        return _worst(question, confidence)
    if question.record.quantile is not None:
        return _tail(question, question.record.quantile, confidence)
    return _mean(question, confidence)


def _worst(question: Question, confidence: float) -> _Answer | str:
    """Return the interval of the worst stratum; those of all strata hold at once."""
    measure, (cell, *_) = question.rule.metric, question.columns[0]
    assert measure in ("relative_error", "absolute_change", "kl")
    worst = worst_stratum(question.table, cell, measure, confidence, question.split)
    if worst is None:
        return f"no stratum of `{cell[0]}` has a `{measure}` that is finite"
    hint = f"the worst stratum has {worst.documents} documents: evaluate on more of its kind"
    return _Answer(worst.interval, worst.stratum, lambda: Deciding(hint))


def _tail(question: Question, share: float, confidence: float) -> _Answer | str:
    """Return the quantile over the tokens, documents being the clusters."""
    table, (cell, *_) = question.table, question.columns[0]
    scored, measured = table.scored(question.split), table.find(*cell)
    assert measured is not None
    assert measured.evidence.fidelity is not None
    interval = quantile_interval(measured.evidence.fidelity.kl_counts[scored], share, confidence)

    def needed() -> Deciding:
        if not math.isfinite(interval.high):
            return Deciding("too few tokens for the upper bound: evaluate on more documents")
        spread = statistics.spread_from(interval, int(scored.sum()), confidence)
        result = Estimate(interval, spread)
        count = documents_to_decide(result, question.rule.margin, confidence)
        return deciding(count and _as_many(question, count), table.documents)

    return _Answer(interval, None, needed)


def _mean(question: Question, confidence: float) -> _Answer | str:
    """Return the largest interval of the columns: all hold at once, so the largest does."""
    table, split = question.table, question.split
    statistic: Statistic = getattr(statistics, question.record.statistic)
    sums = SUMS[question.record.sums]
    results: list[tuple[Interval, str | None, tuple[Cell, ...]]] = []
    against: Sequence[str | None] = question.against or [None] * len(question.columns)
    for cells, other in zip(question.columns, against, strict=True):
        result = estimated(table, cells, statistic, split=split, confidence=confidence, sums=sums)
        if result is not None:
            results.append((result.interval, other, cells))
    if not results:
        return "what it is compared with has a loss that is not finite"
    whole = Interval(
        max(interval.estimate for interval, _, _ in results),
        max(interval.low for interval, _, _ in results),
        max(interval.high for interval, _, _ in results),
    )
    _, other, _ = max(results, key=lambda each: each[0].estimate)
    _, _, cells = max(results, key=lambda each: each[0].high)

    def needed() -> Deciding:
        margin = question.rule.margin
        return settling(table, cells, statistic, margin, split, confidence=confidence, sums=sums)

    return _Answer(whole, other, needed)


def _rollouts(question: Question) -> tuple[RolloutEvidence, RolloutEvidence]:
    found = (question.table.find(*cell) for cell in question.own)
    stream, full = (measured.evidence.rollouts for measured in found if measured is not None)
    assert stream is not None
    assert full is not None
    return stream, full


def _of_rollouts(question: Question, confidence: float) -> _Answer | str:
    quantity = QUANTITIES[question.record.statistic]
    subjects = {subject.label: subject for subject in question.table.subjects}
    interval = quantity(*_rollouts(question), subjects[question.subject], confidence)
    if isinstance(interval, str):
        return f"{question.record.compared} of `{question.subject}` was not measured: {interval}"
    return _Answer(interval, None, lambda: Deciding(_MORE_PROMPTS))


def _of_tasks(question: Question, confidence: float) -> _Answer | str:
    """Return the interval of the mean over tasks, or of the worst: those of all hold at once."""
    measured, full = (question.table.find(*cell) for cell in question.own)
    rule = question.rule
    tasks = tuple(tasks_of(measured)) if rule.tasks else (MEAN,)
    confidence = statistics.simultaneous(confidence, len(tasks))
    results: list[tuple[Interval, str, int]] = []
    for task in tasks:
        pairs = marked(measured, full, task)
        if pairs is None:
            return f"no items of tasks were measured on `{question.subject}`"
        interval = getattr(paired, question.record.statistic)(pairs, confidence)
        if interval is None:
            return f"`{question.subject}` answers all items of `{task}` in full precision"
        results.append((interval, task, sum(len(pair.full_N) for pair in pairs)))
    worst, task, items = max(results, key=lambda one: one[0].estimate)
    high = max(interval.high for interval, _, _ in results)
    whole = Interval(worst.estimate, max(interval.low for interval, _, _ in results), high)

    def needed() -> Deciding:
        count = items_to_detect(whole, items, rule.margin, confidence)
        if count is None:
            return Deciding("more items may not decide it: the estimate is at the margin")
        imported = [one for one in tasks_of(measured).values() if one.imported]
        more = "import more" if imported else "raise `--task-items`"
        return Deciding(f"needs about {count} items to decide; {items} were measured: {more}")

    return _Answer(whole, task if rule.tasks else None, needed)
