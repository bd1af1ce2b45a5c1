"""The check of a question: an interval against a margin.

Three outcomes by the interval: wholly within the margin passes, wholly beyond it fails, and any
other is inconclusive, with the number of documents that would decide. Fewer documents than the
policy requires keep a check from passing, and hide no failure. A loss that is not finite is a
breach.

The end of an interval that has to be within the margin pays for choosing, where what is judged was
chosen on these documents; the other end, by which a check fails, does not (`Levels`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
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
from qaudit.judge.gate.audits import SHIPS, Pair
from qaudit.judge.gate.questions import SUMS, Question, plain_question, quoted, with_full
from qaudit.judge.quantities import (
    Deciding,
    deciding,
    estimated,
    interval_of,
    settling,
    sided,
)
from qaudit.judge.rollouts import QUANTITIES
from qaudit.judge.strata import largest, worst_stratum
from qaudit.judge.table import Cell, is_finite
from qaudit.judge.tasks import MEAN, marked, tasks_of
from qaudit.types import (
    Check,
    Interval,
    Policy,
    bound_of,
    in_unit,
)

FEW = 4
"""Contenders, up to which the one that ships is bounded by its own documents alone."""

_MORE_PROMPTS = "write rollouts of more prompts with `qaudit rollouts`"


class Levels(NamedTuple):
    """The confidence of the lower and of the upper end of an interval."""

    low: float
    high: float


def levels_of(policy: Policy, question: Question, at_once: int) -> Levels:
    """Return the confidences of both ends of an interval.

    What was named is judged with all that was named, at both ends. What was chosen pays for
    choosing at the end that has to be within the margin.
    """
    if question.at_once is None:
        level = statistics.simultaneous(policy.confidence, at_once)
        return Levels(level, level)
    paid = statistics.simultaneous(policy.confidence, question.at_once)
    if question.record.at_least:
        return Levels(paid, policy.confidence)
    return Levels(policy.confidence, paid)


class _Answer(NamedTuple):
    """An interval, the subject it compares with, and what would decide it."""

    interval: Interval
    against: str | None
    deciding: Callable[[], Deciding]


def least_documents(policy: Policy) -> int:
    """Return the number of documents below which no check passes."""
    return max(policy.minimum_documents, statistics.MINIMUM_DOCUMENTS)


def answer(question: Question, policy: Policy, levels: Levels) -> Check:
    rule, record = question.rule, question.record
    check = partial(
        Check,
        rule=record.code,
        name=rule.name,
        level=rule.level,
        metric=rule.metric,
        subject=question.subject,
        scheme=question.scheme,
        margin=rule.margin,
        unit=record.unit,
        line=rule.line,
        bit_class=question.table.class_of.get(question.scheme or ""),
    )
    if question.absent:
        return check(outcome="missing", message=question.absent, hint=question.hint)
    documents = _documents(question)
    for cell in question.own:
        if not all(map(is_finite, question.table.draws(*cell))):
            message = f"the loss of `{cell[0]}` under {cell[1]} is not finite"
            hint = "measure it in float32, and look for outliers in its weights"
            return check(outcome="fail", message=message, hint=hint, documents=documents)
    result = _answer_of(question, levels)
    if isinstance(result, str):
        return check(outcome="missing", message=result, documents=documents)
    outcome, needed = _outcome(question, result, documents, least_documents(policy))
    return check(
        outcome=outcome,
        message=_sentence(question, result.interval, result.against),
        hint=needed.hint,
        interval=result.interval,
        documents=documents,
        against=result.against,
        needed_documents=needed.documents,
    )


def _outcome(
    question: Question, result: _Answer, documents: int, least: int
) -> tuple[Literal["pass", "fail", "inconclusive", "missing"], Deciding]:
    """Return the outcome by the interval, and a hint: what would decide, or what to do."""
    record, interval, margin = question.record, result.interval, question.rule.margin
    passes, fails = record.reaches(interval, margin)
    if fails:
        return "fail", Deciding(_advice(question))
    is_unbounded = record.quantile is not None and not math.isfinite(interval.high)
    if is_unbounded and interval.estimate <= margin:
        # Tokens are too few to bound a tail, and nothing beyond the margin was seen.
        seen = f"{interval.estimate:.2g} was seen, the margin is {bound_of(margin, record.unit)}"
        unbounded = Deciding(f"too few tokens to bound the rarest; {seen}")
        return "pass" if question.rule.level == "warn" else "inconclusive", unbounded
    if documents < least:
        # The policy's number where the interval alone is conclusive.
        required = Deciding(f"the policy requires {least} documents", least)
        if record.of_rollouts:
            required = Deciding(f"the policy requires {least} prompts: {_MORE_PROMPTS}")
        needed = required if passes else result.deciding()
        most = max(needed.documents or 0, required.documents or 0)
        return "inconclusive", replace(needed, documents=most)
    if not passes:
        return "inconclusive", result.deciding()
    if question.unmeasured:
        return "missing", Deciding(f"measure {quoted(question.unmeasured)} of its members, too")
    return "pass", Deciding("")


def _documents(question: Question) -> int:
    """Return how many documents judge, or prompts, or items."""
    if question.columns:
        return question.table.documents
    measured, full = (question.table.find(*cell) for cell in question.own)
    if question.record.of_rollouts and measured is not None and measured.evidence.rollouts:
        return len(np.unique(measured.evidence.rollouts.prompt))
    return sum(len(pair.full_N) for pair in marked(measured, full, MEAN) or ())


def _advice(question: Question) -> str:
    """Return advice on a breach; of a rule that warns, the class may ship all the same."""
    if question.rule.level == "warn":
        return f"accept it, or set `level: error` for the rule `{question.rule.name}`"
    if SHIPS in question.rule.subjects and "qaudit pick" in question.record.hint:
        return "nothing that was measured does better: add schemes or checkpoints"
    return question.record.hint


def _answer_of(question: Question, levels: Levels) -> _Answer | str:
    if question.record.of_rollouts:
        return _of_rollouts(question, levels)
    if question.record.of_tasks:
        return _of_tasks(question, levels)
    if question.rule.strata is not None:
        return _worst(question, levels)
    if question.record.quantile is not None:
        return _tail(question, question.record.quantile, levels)
    return _mean(question, levels)


def _worst(question: Question, levels: Levels) -> _Answer | str:
    """Return the interval of the worst stratum; those of all strata hold at once."""
    measure, cell = question.rule.metric, question.own[0]
    assert measure in ("relative_error", "absolute_change", "kl")
    low, high = (worst_stratum(question.table, cell, measure, level) for level in levels)
    if low is None or high is None:
        return f"no stratum of `{cell[0]}` has a `{measure}` that is finite"
    hint = f"the worst stratum has {low.documents} documents: evaluate on more of its kind"
    whole = Interval(low.interval.estimate, low.interval.low, high.interval.high)
    return _Answer(whole, low.stratum, lambda: Deciding(hint))


def _tail(question: Question, share: float, levels: Levels) -> _Answer:
    """Return the quantile over the tokens, documents being the clusters."""
    table = question.table
    fidelity = table.draws(*question.own[0])[0].evidence.fidelity
    assert fidelity is not None
    counts = fidelity.kl_counts[table.scored()]
    whole = sided(*(quantile_interval(counts, share, level) for level in levels))
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
    table, record, margin = question.table, question.record, question.rule.margin
    statistic: Statistic = getattr(statistics, record.statistic)
    sums = SUMS[record.sums]

    def interval(cells: tuple[Cell, ...]) -> Interval | None:
        make = partial(interval_of, table, cells, statistic, sums=sums)
        return sided(*(make(confidence=level) for level in levels))

    every = [(interval(cells), against, cells) for against, cells in question.columns]
    results = [(found, against, cells) for found, against, cells in every if found is not None]
    if not results:
        return "what it is compared with has a loss that is not finite"
    whole = largest(found for found, _, _ in results)
    _, against, _ = max(results, key=lambda each: each[0].estimate)
    _, _, widest = max(results, key=lambda each: each[0].high)
    if record.against is None and len(question.rivals) > FEW:
        # The pick of many may look quiet by luck: the upper end reaches as far as the lower
        # quartile of those of all contenders.
        width = len(question.columns[0][1])
        others = [interval(with_full(rival)[:width]) for rival in question.rivals]
        reaches = sorted(each.high - each.estimate for each in others if each is not None)
        if reaches:
            least = reaches[min((len(question.rivals) - 1) // 4, len(reaches) - 1)]
            whole = replace(whole, high=max(whole.high, whole.estimate + least))
    return _Answer(whole, against, lambda: settling(table, widest, statistic, margin, whole, sums))


def _of_rollouts(question: Question, levels: Levels) -> _Answer | str:
    label, record = question.subject, question.record
    stream, full = (question.table.draws(*cell)[0].evidence.rollouts for cell in question.own)
    assert stream is not None
    assert full is not None
    subject = next(s for s in question.table.subjects if s.label == label)
    low, high = (QUANTITIES[record.statistic](stream, full, subject, level) for level in levels)
    if isinstance(low, str) or isinstance(high, str):
        return f"{record.compared} of `{label}` was not measured: {low}"
    whole = Interval(low.estimate, low.low, high.high)
    return _Answer(whole, None, lambda: Deciding(_MORE_PROMPTS))


def _of_tasks(question: Question, levels: Levels) -> _Answer | str:
    """Return the interval of the mean over tasks, or of the worst: those of all hold at once."""
    measured, full = (question.table.find(*cell) for cell in question.own)
    rule, label = question.rule, question.subject
    tasks = tuple(tasks_of(measured)) if rule.tasks else (MEAN,)
    levels = Levels(*(statistics.simultaneous(level, len(tasks)) for level in levels))
    results: dict[str, tuple[Interval, int]] = {}
    for task in tasks:
        pairs = marked(measured, full, task)
        if pairs is None:
            return f"no items of tasks were measured on `{label}`"
        statistic: Callable[..., Interval | None] = getattr(paired, question.record.statistic)
        interval = sided(*(statistic(pairs, level) for level in levels))
        if interval is None:
            return f"`{label}` answers all items of `{task}` in full precision"
        results[task] = interval, sum(len(pair.full_N) for pair in pairs)
    worst = max(results, key=lambda task: results[task][0].estimate)
    whole, items = largest(interval for interval, _ in results.values()), results[worst][1]

    def needed() -> Deciding:
        count = items_to_detect(whole, items, rule.margin, max(levels))
        if count is None:
            return Deciding("more items may not decide it: the estimate is at the margin")
        imported = any(task.imported for task in tasks_of(measured).values())
        more = "import more" if imported else "raise `--set task_items=N`"
        return Deciding(f"needs about {count} items to decide; {items} were measured: {more}")

    return _Answer(whole, worst if rule.tasks else None, needed)


# ------------------------------------------------------------------------- against the baseline


def mark_known(
    check: Check, question: Question, pair: Pair, policy: Policy, levels: Levels
) -> Check:
    """Mark a breach that the baseline has, too, at the level that the policy gives it.

    It is known where the baseline breaches the same rule at the same margin and the new one is
    not significantly worse: accepting a breach once is no licence to get worse.
    """
    if question.record.needs_baseline or check.scheme is None:
        return check  # it compares with the baseline already: such a breach is new
    partner = pair.partner(question.rule, check.subject, check.scheme, check.bit_class)
    if partner is None:
        return check
    before = answer(plain_question(question.rule, pair.baseline, partner), policy, levels)
    if before.outcome != "fail" or _is_worse(check, before, question, pair, partner, levels.low):
        return check
    return replace(
        check,
        known=True,
        level=policy.known if check.level == "error" else check.level,
        against=check.against or partner[0],
        message=f"{check.message}; so it was with `{partner[0]}` of the baseline",
    )


def _is_worse(
    check: Check, before: Check, question: Question, pair: Pair, partner: Cell, confidence: float
) -> bool:
    """Whether a breach is significantly worse than before; a loss that is not finite is worst."""
    if check.interval is None or before.interval is None:
        return before.interval is not None
    record = question.record
    if record.worse is None or question.rule.strata is not None:
        if record.at_least:
            return before.interval.low > check.interval.high
        return check.interval.low > before.interval.high
    cells: tuple[Cell, ...] = (question.own[0], pair.cell(partner))
    if record.worse.endswith("_difference"):
        cells = tuple(each for cell in cells for each in with_full(cell))
    statistic: Statistic = getattr(statistics, record.worse)
    sums = SUMS[record.sums]
    change = estimated(pair.joint, cells, statistic, confidence=confidence, sums=sums)
    return change is None or change.interval.low > 0


# -------------------------------------------------------------------------------- its sentence


def _sentence(question: Question, interval: Interval, against: str | None) -> str:
    rule, unit = question.rule, question.record.unit
    text = question.record.sentence.format(
        scheme=question.scheme,
        subject=question.subject,
        against=against,
        change=in_unit(interval, unit),
    )
    text += f" in `{against}`, the worst stratum" if rule.strata is not None else ""
    text += f" in `{against}`, the worst task" if rule.tasks is not None else ""
    return f"{text}, and the margin is {bound_of(rule.margin, unit)}"
