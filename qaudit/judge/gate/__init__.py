"""A policy held against an audit: every rule a check, by an interval against its margin.

All that counts is judged at once: with a confidence of 95 % all intervals of the rules at level
`error` hold together (Bonferroni), however many rules, subjects and schemes there are. Rules at
level `warn` are a family of their own, so that a warning more or less moves no verdict.

Whoever was chosen as the pick is judged on the documents that it was not chosen on, because the
winner of many looks better than it is on the others; a subject that a policy names is judged on
all of them. What was planned and not measured is missing, never left out of `@all` in silence.

`held` is what is judged, `questions` what a policy asks of it, `answers` one check for each,
`baseline` and `known` what the release before says of it, `coverage` and `ignores` the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date

from qaudit.core import statistics
from qaudit.judge.gate.answers import answer, too_few
from qaudit.judge.gate.baseline import Pair, comparable
from qaudit.judge.gate.coverage import coverage, incomplete_pick
from qaudit.judge.gate.held import Held
from qaudit.judge.gate.ignores import ignored
from qaudit.judge.gate.known import with_known
from qaudit.judge.gate.questions import Question, questions
from qaudit.types import Check, Finding, Gate, Level, Policy
from qaudit.types.gated import NEEDS_BASELINE

__all__ = ["Held", "gate", "policy_findings"]


def gate(
    policy: Policy,
    held: Held,
    baseline: Held | None = None,
    *,
    today: date,
    targets: tuple[str, ...] = (),
) -> Gate:
    """Hold an audit to a policy; `today` is what ignores expire by."""
    pair = None
    if baseline is not None:
        comparable(held, baseline)
        pair = Pair.of(held, baseline)
    asked = tuple(questions(policy, held, pair))
    levels: tuple[Level, ...] = ("error", "warn")
    at_once = {level: _intervals(asked, level) for level in levels}
    checks = tuple(_checks(policy, held, pair, asked, at_once))
    checks = (*checks, *too_few(policy, checks, held), *coverage(policy, held))
    checks, rotten = ignored(checks, policy.ignores, today)
    return Gate(
        policy=policy,
        checks=checks,
        warnings=(*incomplete_pick(policy, held), *rotten),
        targets=targets,
        baseline=baseline.name if baseline else None,
        at_once=max(1, at_once["error"]),
    )


def _intervals(asked: Sequence[Question], level: Level) -> int:
    return sum(q.intervals for q in asked if q.rule.level == level)


def _checks(
    policy: Policy,
    held: Held,
    pair: Pair | None,
    asked: Sequence[Question],
    at_once: dict[Level, int],
) -> Iterator[Check]:
    for question in asked:
        each = statistics.simultaneous(policy.confidence, at_once[question.rule.level])
        check = answer(question, policy, each)
        if pair is not None and check.outcome == "fail":
            check = with_known(check, question, pair, policy, each)
        yield check


def policy_findings(policy: Policy, held: Held, today: date) -> tuple[Finding, ...]:
    """Return what a policy says of an audit, as findings of a scan.

    Rules that need a baseline are left to `gate`, and so is what was not measured: a scan says
    by its exit code when it left anything out, and promises nothing about what nobody asked for.
    """
    rules = tuple(rule for rule in policy.rules if rule.metric not in NEEDS_BASELINE)
    found = gate(replace(policy, rules=rules), held, today=today)
    return tuple(_finding(check) for check in found.checks if check.outcome != "missing")


def _finding(check: Check) -> Finding:
    assert check.outcome != "missing"
    assert check.level != "off"
    excused = f" ({check.ignored.reason})" if check.ignored else ""
    return Finding(
        rule=check.rule,
        level="info" if check.ignored or check.outcome == "pass" else check.level,
        subject=check.subject,
        scheme=check.scheme,
        message=f"{check.message}{excused}",
        hint=check.hint,
        interval=check.interval,
        margin=check.margin,
        outcome=check.outcome,
    )
