"""Breaches that the baseline has, too."""

from __future__ import annotations

from dataclasses import replace

from qaudit.core import statistics
from qaudit.core.statistics import Statistic
from qaudit.judge.gate.answers import Levels, answer
from qaudit.judge.gate.audits import Pair
from qaudit.judge.gate.questions import SUMS, Question, question_of
from qaudit.judge.pooling import estimated
from qaudit.judge.table import Cell, Measurements
from qaudit.types import FULL_PRECISION, Check, Policy


def mark_known(
    check: Check, question: Question, pair: Pair, policy: Policy, levels: Levels
) -> Check:
    """Mark a breach that the baseline has, too, at the level that the policy gives it.

    It is known where the baseline breaches the same rule at the same margin and the new one is
    not significantly worse: accepting a breach once is no licence to get worse.
    """
    rule, scheme = question.rule, question.scheme
    if question.record.needs_baseline:
        return check  # it compares with the baseline already: such a breach is new
    if scheme is None:
        return check
    partner = pair.partner(rule, question.subject, scheme, question.bit_class)
    if partner is None:
        return check
    earlier = question_of(rule, pair.baseline, *partner)
    before = answer(earlier, policy, levels)
    theirs = pair.prefix + partner[0], partner[1]
    if before.outcome != "fail" or _is_worse(
        check, before, question, pair.joint, theirs, levels.low
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
    check: Check,
    before: Check,
    question: Question,
    joint: Measurements,
    theirs: Cell,
    confidence: float,
) -> bool:
    """Whether a breach is significantly worse than before; a loss that is not finite is worst."""
    if check.interval is None or before.interval is None:
        return before.interval is not None
    record, scheme = question.record, question.scheme or FULL_PRECISION
    if record.worse is None or question.rule.strata is not None:
        if record.at_least:
            return before.interval.low > check.interval.high
        return check.interval.low > before.interval.high
    cells = [(question.subject, scheme), theirs]
    if record.worse.endswith("_difference"):
        cells = [each for cell in cells for each in (cell, (cell[0], FULL_PRECISION))]
    statistic: Statistic = getattr(statistics, record.worse)
    sums = SUMS[record.sums]
    change = estimated(joint, cells, statistic, confidence=confidence, sums=sums)
    return change is None or change.interval.low > 0
