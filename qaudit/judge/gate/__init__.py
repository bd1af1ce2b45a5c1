"""Apply a policy to an audit: every rule becomes checks, each an interval against a margin.

All intervals of the rules at level `error` hold at once with the policy's confidence
(Bonferroni), however many rules, subjects and schemes there are. Rules at level `warn` are a
family of their own, so that a warning more or less changes no verdict.

The pick is judged on the documents that it was not chosen on, because the winner of many looks
better than it is on the others; a subject that a policy names is judged on all of them. A subject
that was planned and not measured is missing, and not left out of `@all` silently.

`held` is the audit that is judged, `questions` the rules for each subject and scheme, `answers`
one check for each, `baseline` and `known` the comparison with the previous release, `coverage` and
`ignores` the rest.
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
from qaudit.types import NEEDS_BASELINE, Check, Finding, Gate, Level, Policy

__all__ = ["Held", "gate", "policy_findings"]


def gate(
    policy: Policy,
    held: Held,
    baseline: Held | None = None,
    *,
    today: date,
    targets: tuple[str, ...] = (),
) -> Gate:
    """Apply a policy to an audit; ignores expire as of `today`."""
    pair = None
    if baseline is not None:
        comparable(held, baseline)
        pair = Pair.of(held, baseline)
    judged = tuple(questions(policy, held, pair))
    levels: tuple[Level, ...] = ("error", "warn")
    at_once = {level: _intervals(judged, level) for level in levels}
    checks = tuple(_checks(policy, pair, judged, at_once))
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


def _intervals(judged: Sequence[Question], level: Level) -> int:
    return sum(q.intervals for q in judged if q.rule.level == level)


def _checks(
    policy: Policy,
    pair: Pair | None,
    judged: Sequence[Question],
    at_once: dict[Level, int],
) -> Iterator[Check]:
    for question in judged:
        each = statistics.simultaneous(policy.confidence, at_once[question.rule.level])
        check = answer(question, policy, each)
        if pair is not None and check.outcome == "fail":
            check = with_known(check, question, pair, policy, each)
        yield check


def policy_findings(policy: Policy, held: Held, today: date) -> tuple[Finding, ...]:
    """Return the checks of a policy as findings of a scan.

    Rules that need a baseline are left to `gate`, and so are missing measurements: the exit code
    of a scan reports what it left out.
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
