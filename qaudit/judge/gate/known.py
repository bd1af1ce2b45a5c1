"""Breaches that are not new: the release before has them, too.

Known is a breach where the baseline breaches the same rule at the same margin, and it is not
shown to be worse now: what was accepted once is no licence to get worse. It still counts, unless
the policy says `known: warn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qaudit.core import statistics
from qaudit.core.statistics import Statistic
from qaudit.judge.gate.answers import answer
from qaudit.judge.gate.baseline import Pair
from qaudit.judge.gate.questions import Question, question_of
from qaudit.judge.pooling import Cell, estimated
from qaudit.types import FULL_PRECISION, Check, Metric, Policy

_WORSE: Mapping[Metric, Statistic] = {
    "relative_error": statistics.excess_difference,
    "absolute_change": statistics.change_difference,
    "soup_against_members": statistics.change,
}


def with_known(
    check: Check, question: Question, pair: Pair, policy: Policy, confidence: float
) -> Check:
    """Mark a breach that the baseline has, too; the policy says what that is worth."""
    rule, scheme = question.rule, question.scheme
    if rule.metric not in _WORSE and rule.metric != "accuracy_drop":
        return check  # it compares with the baseline already: what it finds is new
    partner = pair.partner(rule, question.subject)
    if partner is None or scheme is None:
        return check
    before = answer(
        question_of(rule, pair.baseline, partner, scheme, question.split), policy, confidence
    )
    if before.outcome != "fail" or _is_worse(check, before, question, pair, partner, confidence):
        return check
    return replace(
        check,
        known=True,
        level=policy.known if check.level == "error" else check.level,
        against=check.against or partner,
        message=f"{check.message}; so it was with `{partner}` of the baseline",
    )


def _is_worse(
    check: Check,
    before: Check,
    question: Question,
    pair: Pair,
    partner: str,
    confidence: float,
) -> bool:
    """Say whether a breach is shown to be worse than it was; a loss that is no number is worst."""
    if check.interval is None or before.interval is None:
        return before.interval is not None
    if question.rule.metric == "accuracy_drop":
        return check.interval.low > before.interval.high
    scheme = question.scheme or FULL_PRECISION
    ours, theirs = question.subject, pair.name(partner)
    cells: list[Cell] = [(ours, scheme), (theirs, scheme)]
    if question.rule.metric != "soup_against_members":
        cells = [(s, which) for s in (ours, theirs) for which in (scheme, FULL_PRECISION)]
    found = estimated(
        pair.joint,
        cells,
        _WORSE[question.rule.metric],
        split=question.split,
        confidence=confidence,
    )
    return found is None or found.interval.low > 0
