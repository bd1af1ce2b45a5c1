"""Apply a policy to an audit: every rule becomes checks, each an interval against a margin.

What ships is judged class by class (`classes`), and the answer is the worst of the checks that
count, so that the classes and the answer agree by construction. A release needs all of its classes,
so that none pays for another; each pays for choosing (`choose`). A contender with fewer bits that
breaks a rule does not ship in place of the leader.

Subjects that a policy names are judged together: all intervals of such rules at level `error` hold
at once with the policy's confidence (Bonferroni), however many there are. Rules at level `warn` are
a family of their own, so that a warning more or less changes no verdict. A subject that was planned
and not measured is missing, and not left out of `@all` silently.

`audits` has the audit that is judged and its baseline, `questions` the rules for each subject and
scheme, `answers` one check for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import MAXYEAR, date
from typing import Literal

from qaudit.core import statistics
from qaudit.judge.choose import ClassChoice, cell_of
from qaudit.judge.gate.answers import Levels, answer, least_documents
from qaudit.judge.gate.audits import (
    PICK,
    SHIPS,
    GateInput,
    Pair,
    covers_class,
    covers_scheme,
    matches,
    matches_scheme,
)
from qaudit.judge.gate.classes import (
    REQUIRED,
    UNANSWERED,
    class_verdicts,
    unanswered,
    verdict_of,
    without_answers,
)
from qaudit.judge.gate.known import mark_known
from qaudit.judge.gate.questions import Asking, Question, questions
from qaudit.support.keys import first_of
from qaudit.types import Check, Finding, Gate, Ignore, Level, Measurement, Policy

__all__ = ["GateInput", "findings_of", "gate", "verdict_of"]

_AGAIN = "scan again: what is missing is measured again"
TOO_FEW, ROTTEN = "QA026", "QA027"


def gate(
    policy: Policy,
    audit: GateInput,
    baseline: GateInput | None = None,
    *,
    today: date,
    targets: tuple[str, ...] = (),
) -> Gate:
    """Apply a policy to an audit; ignores expire as of `today`."""
    pair = Pair.of(audit, baseline) if baseline else None
    audit = _settled(policy, audit, pair)
    every = tuple(questions(policy, audit, pair))
    at_once: dict[Level, int] = {"error": 0, "warn": 0}
    for question in every:
        if question.at_once is None:
            at_once[question.rule.level] += question.intervals
    checks = tuple(_checks(policy, pair, every, at_once))
    checks = (*checks, *unanswered(policy, audit, checks))
    checks = (*checks, *without_answers(policy, audit, checks))
    checks = (*checks, *_too_few(policy, checks, audit), *_coverage(policy, audit))
    checks, rotten = _ignore(checks, policy.ignores, today)
    return Gate(
        policy=policy,
        checks=checks,
        warnings=(*_incomplete_pick(policy, audit), *rotten),
        targets=targets,
        baseline=baseline.name if baseline else None,
        at_once=max(1, at_once["error"]),
        classes=tuple(class_verdicts(policy, audit, checks)),
    )


def _settled(policy: Policy, audit: GateInput, pair: Pair | None) -> GateInput:
    """Return the audit with what ships of each class: what is preferred and breaks no rule."""
    picked, instead = dict[str, Measurement](), dict[str, Measurement]()
    for choice in audit.made:
        if choice.leader is None:
            continue
        broken = {
            cell_of(m) for m in (*choice.preferred, choice.leader)
            if _breaks(policy, audit, pair, choice, m)
        }  # fmt: skip
        whole = (m for m in choice.preferred if cell_of(m) not in broken)
        picked[choice.bit_class] = next(whole, choice.leader)
        if cell_of(picked[choice.bit_class]) in broken:
            rivals = (m for m in choice.others if not _breaks(policy, audit, pair, choice, m))
            if (rival := next(rivals, None)) is not None:
                instead[choice.bit_class] = rival
    return replace(audit, picked=picked, instead=instead)


def _breaks(
    policy: Policy, audit: GateInput, pair: Pair | None, choice: ClassChoice, measured: Measurement
) -> bool:
    """Return whether a candidate breaks a rule at level `error` about what ships."""
    asking = Asking(audit, pair, policy.classes)
    for rule in policy.rules:
        covered = covers_class(rule, choice.bit_class, policy.classes)
        is_asked = rule.level == "error" and SHIPS in rule.subjects
        if not is_asked or not covered or not covers_scheme(rule, measured.scheme):
            continue
        question = asking.of_cell(replace(rule, subjects=(SHIPS,)), *cell_of(measured))
        question = replace(question, at_once=choice.at_once, rivals=choice.cells)
        if question.absent:
            continue
        if answer(question, policy, _levels(policy, question, 1)).outcome == "fail":
            return True
    return False


def _levels(policy: Policy, question: Question, at_once: int) -> Levels:
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


def _checks(
    policy: Policy, pair: Pair | None, every: Sequence[Question], at_once: dict[Level, int]
) -> Iterator[Check]:
    for question in every:
        levels = _levels(policy, question, at_once[question.rule.level])
        check = answer(question, policy, levels)
        if pair is not None and check.outcome == "fail":
            check = mark_known(check, question, pair, policy, levels)
        yield check


def findings_of(judged: Gate) -> tuple[Finding, ...]:
    """Return the checks of a policy as findings of a scan.

    Missing measurements are left to the verdict and to `gate`: the exit code of a scan reports
    what it left out.
    """
    return tuple(_finding(check) for check in judged.checks if check.outcome != "missing")


def _finding(check: Check) -> Finding:
    assert check.outcome != "missing"
    assert check.level != "off"
    excuse = f" ({check.ignored.reason})" if check.ignored else ""
    return Finding(
        rule=check.rule,
        level="info" if check.ignored or check.outcome == "pass" else check.level,
        subject=check.subject,
        scheme=check.scheme,
        message=f"{check.message}{excuse}",
        hint=check.hint,
        interval=check.interval,
        margin=check.margin,
        outcome=check.outcome,
    )


def _too_few(policy: Policy, checks: Sequence[Check], audit: GateInput) -> Iterator[Check]:
    """QA026: fewer documents than the policy requires; once for all checks."""
    least = least_documents(policy)
    judged = [c for c in checks if c.interval is not None and c.record and not c.record.of_tasks]
    few = [c for c in judged if c.documents < least]
    if not few:
        return
    errors = [c for c in few if c.level == "error"]
    fewest = min(c.documents for c in errors or few)
    yield Check(
        rule=TOO_FEW,
        name="minimum_documents",
        level="error" if errors else "warn",
        metric="documents",
        subject=(errors or few)[0].subject,
        scheme=None,
        outcome="inconclusive",
        message=f"{fewest} documents are fewer than the {least} that the policy requires",
        hint=f"evaluate on at least {least} documents",
        documents=fewest,
        line=policy.line_of_documents,
    )


def _coverage(policy: Policy, audit: GateInput) -> Iterator[Check]:
    """QA025: every gated subject under every required scheme, and every required subject."""
    for selector in policy.required_subjects:
        labels = audit.labels([selector])
        if all(label in audit.skipped for label in labels):
            sentence = f"no subject matches `{selector}`, which the policy requires"
            if labels:
                sentence = f"`{selector}` is required, and {audit.not_measured(labels[0])}"
            yield _required(policy, selector, None, "missing", sentence, "measure it, too")
    for label, scheme in audit.lost:
        sentence = f"`{label}` was planned under {scheme}, and the audit has no result of it"
        yield _required(policy, label, scheme, "missing", sentence, _AGAIN)
    if not policy.required_schemes:
        return
    rules = (rule for rule in policy.rules if rule.level != "off")
    selectors = [*policy.required_subjects, *(name for rule in rules for name in rule.subjects)]
    labels = audit.labels(selectors or [PICK])
    if not labels:
        sentence = "schemes are required, and there is no subject to require them of"
        yield _required(policy, ", ".join(selectors), None, "missing", sentence, "measure one")
    for label in labels:
        for scheme in policy.required_schemes:
            yield _covered(policy, audit, label, scheme)


def _covered(policy: Policy, audit: GateInput, label: str, scheme: str) -> Check:
    schemes = [m.scheme for m in audit.table.measurements if m.subject == label]
    if any(matches_scheme(name, scheme) for name in schemes):
        sentence = f"`{label}` was measured under {scheme}, which the policy requires"
        return _required(policy, label, scheme, "pass", sentence, "")
    sentence = f"`{label}` was not measured under {scheme}, which the policy requires"
    if label in audit.skipped:
        sentence = f"{scheme} is required of it, and {audit.not_measured(label)}"
    hint = f"scan with `--schemes {scheme}`, too"
    return _required(policy, label, scheme, "missing", sentence, hint)


def _required(
    policy: Policy,
    subject: str,
    scheme: str | None,
    outcome: Literal["pass", "missing"],
    message: str,
    hint: str,
) -> Check:
    return Check(
        rule=REQUIRED,
        name="required",
        level="error",
        metric="coverage",
        subject=subject,
        scheme=scheme,
        outcome=outcome,
        message=message,
        hint=hint,
        line=policy.line_of_required,
    )


def _incomplete_pick(policy: Policy, audit: GateInput) -> Iterator[Finding]:
    """Warn where a rule is about the pick, and not everything was there to be picked."""
    rules = (rule for rule in policy.rules if rule.level != "off")
    about = any({PICK, SHIPS} & {*rule.subjects} for rule in rules)
    if not about or not audit.skipped or audit.pick is None:
        return
    names = first_of(list(audit.skipped))
    subject, hint = audit.pick.subject, _AGAIN
    message = (
        f"`{subject}` is the best of what was measured: {names} was planned and is not among it"
    )
    yield Finding(REQUIRED, "warn", subject, None, message, hint, outcome="inconclusive")


def _ignore(
    checks: Sequence[Check], ignores: Sequence[Ignore], today: date
) -> tuple[tuple[Check, ...], tuple[Finding, ...]]:
    """Return the checks with what is ignored, and warnings about ignores that do nothing.

    An ignore that has expired, that holds for more than two years, or that nothing needs, is a
    warning: it hides nothing today, and may tomorrow.
    """
    is_leap_day = (today.month, today.day) == (2, 29)  # and none two years later
    latest = date(min(today.year + 2, MAXYEAR), today.month, today.day - is_leap_day)
    valid = [ignore for ignore in ignores if today <= ignore.until <= latest]
    marked = tuple(
        replace(check, ignored=next((i for i in valid if _covers(i, check)), None))
        for check in checks
    )
    warnings = []
    for ignore in ignores:
        if ignore.until < today:
            expired = f"expired on {ignore.until.isoformat()}"
            warnings.append(_rotten(ignore, expired, "fix the breach, or renew the ignore"))
        elif ignore.until > latest:
            ahead = f"holds until {ignore.until.isoformat()}, more than two years ahead"
            hint = f"write a day up to {latest.isoformat()}, and renew it then"
            warnings.append(_rotten(ignore, ahead, hint))
        elif not any(_covers(ignore, check) for check in checks):
            warnings.append(_rotten(ignore, "matches nothing that needs it", "remove it"))
    return marked, tuple(warnings)


def _covers(ignore: Ignore, check: Check) -> bool:
    by_code = ignore.rule == check.rule
    if not by_code and ignore.rule != check.name:
        return False
    # A cell near its margin would else be excused on some documents and stop a release on others.
    excusable = check.outcome in ("fail", "inconclusive")
    if check.outcome == "missing":  # nothing was measured: only the code of coverage excuses it
        excusable = check.rule in (REQUIRED, UNANSWERED) and by_code
    scheme = check.scheme or ""
    return (
        excusable
        and matches(check.subject, ignore.subject)
        and matches_scheme(scheme, ignore.scheme)
    )


def _rotten(ignore: Ignore, what: str, hint: str) -> Finding:
    message = f"the ignore of `{ignore.rule}` in line {ignore.line} {what}: {ignore.reason}"
    scheme = None if ignore.scheme == "*" else ignore.scheme
    return Finding(ROTTEN, "warn", ignore.subject, scheme, message, hint)
