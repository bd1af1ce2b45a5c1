"""One check for each question: an interval against a margin, or why there is none.

Three outcomes by the interval: wholly within the margin passes, wholly beyond it fails, and any
other is inconclusive, with the number of documents that would decide. With fewer documents than
the policy requires, every interval is inconclusive. A loss that is not finite is a breach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from qaudit.core import items as paired
from qaudit.core import statistics
from qaudit.core.histogram import quantile_interval
from qaudit.core.items import Marked
from qaudit.core.statistics import Statistic
from qaudit.judge.gate.audits import Pair
from qaudit.judge.gate.questions import STATISTICS, Question, question_of
from qaudit.judge.pooling import estimated, settling
from qaudit.judge.strata import worst_stratum
from qaudit.judge.table import Cell, Table, is_finite
from qaudit.judge.tasks import MEAN, marked, tasks_of
from qaudit.types import (
    CODE_OF,
    FULL_PRECISION,
    HELD_OUT,
    OF_TASKS,
    UNIT_OF,
    Check,
    Interval,
    Metric,
    Policy,
    Unit,
)


@dataclass(frozen=True)
class _Answer:
    """An interval, the subject it compares with, and a hint on what would decide it."""

    interval: Interval
    against: str | None
    deciding: Callable[[], str]


def answer(question: Question, policy: Policy, confidence: float) -> Check:
    """Answer a question with intervals of this confidence."""
    rule = question.rule
    check = Check(
        rule=CODE_OF[rule.metric],
        name=rule.name,
        level=rule.level,
        metric=rule.metric,
        subject=question.subject,
        scheme=question.scheme,
        outcome="missing",
        message=question.absent,
        hint=question.hint,
        margin=rule.margin,
        unit=UNIT_OF[rule.metric],
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
    pairs = marked(measured, full, MEAN)
    return sum(len(pair.full_N) for pair in pairs or ())


def _judge(check: Check, question: Question, result: _Answer, policy: Policy) -> Check:
    outcome: Literal["pass", "fail", "inconclusive", "missing"]
    interval, margin, hint = result.interval, question.rule.margin, ""
    fails, passes = interval.low > margin, interval.high <= margin
    least = least_documents(policy)
    if check.documents < least:
        outcome = "inconclusive"
        # The policy's number where the interval alone is conclusive.
        conclusive = fails or passes
        hint = f"the policy requires {least} documents" if conclusive else result.deciding()
    elif fails:
        outcome, hint = "fail", _HINTS[question.rule.metric]
    elif not passes:
        outcome, hint = "inconclusive", result.deciding()
    elif question.unmeasured:
        names = ", ".join(f"`{name}`" for name in question.unmeasured)
        outcome, hint = "missing", f"measure {names} of its members, too"
    else:
        outcome = "pass"
    return replace(
        check,
        outcome=outcome,
        message=_message(question, result, check.documents),
        hint=hint,
        interval=interval,
        against=result.against,
    )


def least_documents(policy: Policy) -> int:
    """Return the number of documents below which every check is inconclusive."""
    return max(policy.minimum_documents, statistics.MINIMUM_DOCUMENTS)


def _answer_of(question: Question, confidence: float) -> _Answer | str:
    if not question.columns:
        return _of_tasks(question, confidence)
    if question.rule.strata is not None:
        return _worst(question, confidence)
    if question.rule.metric == "kl_p999":
        return _tail(question, confidence)
    return _mean(question, confidence)


def _worst(question: Question, confidence: float) -> _Answer | str:
    """Return the interval of the worst stratum; those of all strata hold at once."""
    measure, (cell, *_) = question.rule.metric, question.columns[0]
    assert measure in ("relative_error", "absolute_change", "kl")
    worst = worst_stratum(question.table, cell, measure, confidence, question.split)
    if worst is None:
        return f"no stratum of `{cell[0]}` has a `{measure}` that is finite"
    hint = f"the worst stratum has {worst.documents} documents: evaluate on more of its kind"
    return _Answer(worst.interval, worst.stratum, lambda: hint)


def _tail(question: Question, confidence: float) -> _Answer | str:
    """Return the quantile over the tokens of all draws, documents being the clusters.

    Its interval is over documents alone: what another draw would change is not in it.
    """
    table, (cell, *_) = question.table, question.columns[0]
    scored, draws = table.scored(question.split), table.draws(*cell)
    counts = [m.evidence.fidelity.kl_counts[scored] for m in draws if m.evidence.fidelity]
    interval = quantile_interval(np.sum(counts, axis=0), 0.999, confidence)

    def deciding() -> str:
        documents = int(scored.sum())
        needed = statistics.documents_to_settle(interval, documents, question.rule.margin)
        if needed is None:
            return "more documents may not decide it: the estimate is at the margin"
        return f"needs about {needed} documents to decide; {documents} were measured"

    return _Answer(interval, None, deciding)


def _mean(question: Question, confidence: float) -> _Answer | str:
    """Return the largest interval of the columns: all hold at once, so the largest does."""
    table, split = question.table, question.split
    statistic, sums = STATISTICS[question.rule.metric]
    results: list[tuple[Interval, str | None, tuple[Cell, ...]]] = []
    against: Sequence[str | None] = question.against or [None] * len(question.columns)
    for cells, other in zip(question.columns, against, strict=True):
        one = estimated(table, cells, statistic, split=split, confidence=confidence, sums=sums)
        if one is not None:
            results.append((one.interval, other, cells))
    if not results:
        return "what it is compared with has a loss that is not finite"
    whole = Interval(
        max(one.estimate for one, _, _ in results),
        max(one.low for one, _, _ in results),
        max(one.high for one, _, _ in results),
    )
    _, other, _ = max(results, key=lambda each: each[0].estimate)
    _, _, cells = max(results, key=lambda each: each[0].high)

    def deciding() -> str:
        margin = question.rule.margin
        return settling(table, cells, statistic, margin, split, confidence=confidence, sums=sums)

    return _Answer(whole, other, deciding)


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
        interval = _task_interval(rule.metric, pairs, confidence)
        if interval is None:
            return f"`{question.subject}` answers all items of `{task}` in full precision"
        results.append((interval, task, sum(len(pair.full_N) for pair in pairs)))
    worst, task, items = max(results, key=lambda one: one[0].estimate)
    high = max(one.high for one, _, _ in results)
    whole = Interval(worst.estimate, max(one.low for one, _, _ in results), high)

    def deciding() -> str:
        needed = statistics.documents_to_settle(whole, items, rule.margin)
        if needed is None:
            return "more items may not decide it: the estimate is at the margin"
        return f"needs about {needed} items to decide; {items} were measured"

    return _Answer(whole, task if rule.tasks else None, deciding)


def _task_interval(metric: Metric, pairs: Sequence[Marked], confidence: float) -> Interval | None:
    if metric == "flips":
        return paired.flips(pairs, confidence)
    drop = paired.drop(pairs, confidence, normalized=True)
    if drop is None and not any(pair.lost for pair in pairs):
        return Interval(0.0, 0.0, 0.0)
    return drop


# ------------------------------------------------------------------------------- known breaches

_WORSE: Mapping[Metric, Statistic] = {
    "relative_error": statistics.excess_difference,
    "absolute_change": statistics.change_difference,
    "soup_against_members": statistics.change,
    "kl": statistics.change,
    "top1": statistics.change,
}
_BY_ESTIMATES: frozenset[Metric] = frozenset({*OF_TASKS, "kl_p999"})
"""Their two intervals are compared, and not an interval of their difference."""


def mark_known(
    check: Check, question: Question, pair: Pair, policy: Policy, confidence: float
) -> Check:
    """Mark a breach that the baseline has, too, at the level that the policy gives it.

    It is known where the baseline breaches the same rule at the same margin and the new one is
    not significantly worse: accepting a breach once is no licence to get worse.
    """
    rule, scheme = question.rule, question.scheme
    if rule.metric not in _WORSE and rule.metric not in _BY_ESTIMATES:
        return check  # it compares with the baseline already: such a breach is new
    if scheme is None:
        return check
    partner = pair.partner(rule, question.subject, scheme, question.bit_class)
    if partner is None:
        return check
    earlier = question_of(rule, pair.baseline, *partner, question.split)
    before = answer(earlier, policy, confidence)
    theirs = pair.prefix + partner[0], partner[1]
    if before.outcome != "fail" or _is_worse(
        check, before, question, pair.joint, theirs, confidence
    ):
        return check
    return replace(
        check,
        known=True,
        level=policy.known if check.level == "error" else check.level,
        against=check.against or partner[0],
        message=f"{check.message}; so it was with `{partner[0]}` of the baseline",
    )


def _is_worse(
    check: Check, before: Check, question: Question, joint: Table, theirs: Cell, confidence: float
) -> bool:
    """Whether a breach is significantly worse than before; a loss that is not finite is worst."""
    if check.interval is None or before.interval is None:
        return before.interval is not None
    metric, scheme = question.rule.metric, question.scheme or FULL_PRECISION
    if metric in _BY_ESTIMATES or question.rule.strata is not None:
        return check.interval.low > before.interval.high
    cells = [(question.subject, scheme), theirs]
    if metric in ("relative_error", "absolute_change"):
        cells = [each for cell in cells for each in (cell, (cell[0], FULL_PRECISION))]
    _, sums = STATISTICS[metric]
    change = estimated(
        joint, cells, _WORSE[metric], split=question.split, confidence=confidence, sums=sums
    )
    return change is None or change.interval.low > 0


# ------------------------------------------------------------------------------------ sentences

_OTHER = "ship another subject or scheme: `qaudit pick` names one"
_HINTS: dict[Metric, str] = {
    "relative_error": _OTHER,
    "absolute_change": _OTHER,
    "loss_against_baseline": "ship another subject, or keep the release before",
    "error_against_baseline": "ship another subject: this one is more fragile than the last",
    "accuracy_drop": _OTHER,
    "soup_against_members": "ship that member, or leave it out of the soup",
    "kl": _OTHER,
    "kl_p999": _OTHER,
    "top1": _OTHER,
    "flips": _OTHER,
}
_SENTENCES: dict[Metric, str] = {
    "relative_error": "{scheme} raises the loss of `{subject}` by {change}{where}",
    "absolute_change": "{scheme} raises the loss of `{subject}` by {change}{where}",
    "loss_against_baseline": "at {scheme} the loss of `{subject}` minus that of the baseline's "
    "`{against}` is {change}{where}",
    "error_against_baseline": "at {scheme} the relative error of `{subject}` minus that of the "
    "baseline's `{against}` is {change}{where}",
    "accuracy_drop": "{scheme} raises the errors of `{subject}` on tasks by {change}{where}",
    "soup_against_members": "at {scheme} the loss of `{subject}` minus that of its best member "
    "`{against}` is {change}{where}",
    "kl": "at {scheme} the KL divergence of `{subject}` to full precision is {change}{where}",
    "kl_p999": "at {scheme} the KL divergence of `{subject}` at one token in a thousand exceeds "
    "{change}{where}",
    "flips": "{scheme} flips {change} of the answers of `{subject}`{where}",
    "top1": "{scheme} changes the likeliest token of `{subject}` at {change} of tokens{where}",
}


def _message(question: Question, result: _Answer, documents: int) -> str:
    metric, margin = question.rule.metric, question.rule.margin
    unit = UNIT_OF[metric]
    half = question.split == HELD_OUT and question.columns
    sentence = _SENTENCES[metric].format(
        scheme=question.scheme,
        subject=question.subject,
        against=result.against,
        change=_in_unit(result.interval, unit),
        where=f" on the {documents} documents that it was not chosen on" if half else "",
    )
    if question.rule.strata is not None:
        sentence += f" in `{result.against}`, the worst stratum"
    if question.rule.tasks is not None:
        sentence += f" in `{result.against}`, the worst task"
    bound = f"{100 * margin:g} %" if unit == "fraction" else f"{margin:g} nats"
    return f"{sentence}, and the margin is {bound}"


def _in_unit(interval: Interval, unit: Unit) -> str:
    """Print an interval in percent or in nats, with two significant digits of its half-width."""
    scale, name = (100.0, "%") if unit == "fraction" else (1.0, "nats per token")
    if interval.estimate == interval.low == interval.high == 0:
        return f"0 {name}"
    half, digits = scale * (interval.high - interval.low) / 2, 3
    if math.isfinite(half) and half > 0:
        digits = min(6, max(1, 1 - math.floor(math.log10(half))))
    values = (interval.estimate, interval.low, interval.high)
    estimate, low, high = (f"{scale * value:.{digits}f}" for value in values)
    return f"{estimate} {name} [{low}, {high}]"
