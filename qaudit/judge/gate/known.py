"""Known breaches: those that the previous release has, too.

A breach is known where the baseline breaches the same rule at the same margin and the new one is
not significantly worse: accepting a breach once is no licence to get worse. It still counts,
unless the policy has `known: warn`.
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
    """Mark a breach that the baseline has, too, at the level that the policy gives it."""
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
    """Whether a breach is significantly worse than before; a loss that is not finite is worst."""
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
