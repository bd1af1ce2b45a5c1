"""Apply a policy to an audit: every rule becomes checks, each an interval against a margin.

What ships is judged class by class, and the answer is the worst of the checks that
count, so that the classes and the answer agree by construction. A release needs all of its classes,
so that none pays for another; each pays for choosing (`choose`). The upper ends of all contenders
hold at once, so that any of the leader's subject may ship that is shown to hold to the rules:
of these the one with the fewest bits. Where none is, it is the first that breaks no rule.

Subjects that a policy names are judged together: all intervals of such rules at level `error` hold
at once with the policy's confidence (Bonferroni), however many there are. Rules at level `warn` are
a family of their own, so that a warning more or less changes no verdict. A subject that was planned
and not measured is missing, and not left out of `@all` silently.

A bit class is ship, hold, undecided, or not judged. The rules about what ships of it decide: those
of level `error`, or the warnings where there are no others. `classes` of a policy and `--bits` name
the classes that are asked for. One that no rule covers is inconclusive where it is asked for, and
not judged elsewhere. A class that was not measured is not asked for, unless `--bits` names it, or
none of the classes that count was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from datetime import MAXYEAR, date
from functools import partial
from typing import Any

from qaudit.judge.choose import ClassChoice
from qaudit.judge.gate.audits import (
    PICK,
    SHIPS,
    GateInput,
    Pair,
    covers_class,
    matches,
    matches_any,
    matches_scheme,
)
from qaudit.judge.gate.checks import answer, levels_of, mark_known, of_cell, questions
from qaudit.support.keys import first_of
from qaudit.types import (
    METRICS,
    NEAR_BASELINE,
    Check,
    ClassVerdict,
    Finding,
    Gate,
    Ignore,
    Level,
    Measurement,
    Policy,
    Status,
    Verdict,
)

__all__ = ["GateInput", "findings_of", "gate", "verdict_of"]

_AGAIN = "scan again: what is missing is measured again"


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
    made: list[Check] = []
    for question in every:
        levels = levels_of(policy, question, at_once[question.rule.level])
        check = answer(question, policy, levels)
        if pair is not None and check.outcome == "fail":
            check = mark_known(check, question, pair, policy, levels)
        made.append(check)
    made += unanswered(policy, audit, tuple(made))
    made += without_answers(policy, audit, tuple(made))
    made += (*_too_few(policy, made), *_coverage(policy, audit))
    checks, rotten = _ignore(made, policy.ignores, today)
    covered = ((chosen, _covering(chosen, checks)) for chosen in audit.choices)
    return Gate(
        policy=policy,
        checks=checks,
        warnings=(*_incomplete_pick(policy, audit), *rotten),
        targets=targets,
        baseline=baseline.name if baseline else None,
        at_once=max(1, at_once["error"]),
        classes=tuple(
            _judged(chosen, checks) if checks else replace(chosen, status="unjudged")
            for chosen, checks in covered
        ),
    )


def _settled(policy: Policy, audit: GateInput, pair: Pair | None) -> GateInput:
    """Return the audit with what ships of each class: what is preferred and breaks no rule."""
    rules = [
        replace(rule, subjects=(SHIPS,))
        for rule in policy.rules
        if rule.level == "error" and SHIPS in rule.subjects
        if pair is not None or not METRICS[rule.metric].needs_baseline
    ]

    def worst(choice: ClassChoice, measured: Measurement) -> str:
        outcomes = {"pass"}
        for rule in rules:
            if not covers_class(rule, choice.bit_class, policy.classes):
                continue
            if matches_any(measured.scheme, rule.schemes):
                question = of_cell(rule, audit, pair, measured.cell)
                question = replace(question, at_once=choice.at_once, rivals=choice.cells)
                outcomes.add(answer(question, policy, levels_of(policy, question, 1)).outcome)
        return min(outcomes, key=_WORST.index)

    settled = []
    for choice in audit.made:
        picked, changes = choice.leader, choice.changes
        if picked is not None:
            by_outcome = {worst(choice, m): m for m in reversed(choice.preferred)}
            best = max(by_outcome, key=_WORST.index)
            rivals = (m for m in choice.contenders if m.subject != picked.subject)
            if best != "fail":
                picked = by_outcome[best]
            elif rival := next((m for m in rivals if worst(choice, m) != "fail"), None):
                would = f"`{rival.subject}` at {rival.scheme}, whose loss is indistinguishable, "
                changes = (would + "breaks no rule", *changes)
        settled.append(replace(choice, picked=picked, changes=changes))
    return replace(audit, settled=tuple(settled))


def findings_of(judged: Gate) -> tuple[Finding, ...]:
    """Return the checks of a policy as findings of a scan.

    Missing measurements are left to the verdict and to `gate`: the exit code of a scan reports
    what it left out.
    """
    findings = []
    for check in judged.checks:
        columns: dict[str, Any] = {f.name: getattr(check, f.name) for f in fields(Finding)}
        if check.ignored:
            columns["message"] += f" ({check.ignored.reason})"
        if check.ignored or check.outcome == "pass":
            columns["level"] = "info"
        if check.outcome != "missing":
            findings.append(Finding(**columns))
    return tuple(findings)


def _too_few(policy: Policy, checks: Sequence[Check]) -> Iterator[Check]:
    """QA026: fewer documents than the policy requires; once for all checks."""
    least = policy.minimum_documents
    judged = [c for c in checks if c.interval is not None and c.record and not c.record.of_tasks]
    few = [c for c in judged if c.documents < least]
    few = [c for c in few if c.level == "error"] or few
    if not few:
        return
    fewest = min(c.documents for c in few)
    yield Check(
        rule="QA026",
        name="minimum_documents",
        level=few[0].level,
        metric="documents",
        subject=few[0].subject,
        scheme=None,
        outcome="inconclusive",
        message=f"{fewest} documents are fewer than the {least} that the policy requires",
        hint=f"evaluate on at least {least} documents",
        documents=fewest,
        line=policy.line_of_documents,
    )


def _required(policy: Policy) -> partial[Check]:
    """QA025: return a check of coverage; what it is about is to be added."""
    line = policy.line_of_required
    return partial(Check, rule=REQUIRED, name="required", metric="coverage", line=line)


def _coverage(policy: Policy, audit: GateInput) -> Iterator[Check]:
    """QA025: every gated subject under every required scheme, and every required subject."""
    required = partial(_required(policy), level="error")
    missing = partial(required, outcome="missing")
    for selector in policy.required_subjects:
        labels = audit.labels([selector])
        if all(label in audit.skipped for label in labels):
            message = f"no subject matches `{selector}`, which the policy requires"
            if labels:
                message = f"`{selector}` is required, and {audit.not_measured(labels[0])}"
            yield missing(subject=selector, scheme=None, message=message, hint="measure it, too")
    for label, scheme in audit.lost:
        message = f"`{label}` was planned under {scheme}, and the audit has no result of it"
        yield missing(subject=label, scheme=scheme, message=message, hint=_AGAIN)
    if not policy.required_schemes:
        return
    rules = (rule for rule in policy.rules if rule.level != "off")
    selectors = [*policy.required_subjects, *(name for rule in rules for name in rule.subjects)]
    labels = audit.labels(selectors or [PICK])
    if not labels:
        message = "schemes are required, and there is no subject to require them of"
        subject = ", ".join(selectors)
        yield missing(subject=subject, scheme=None, message=message, hint="measure one")
    measured = audit.table.measurements
    for label, scheme in ((label, each) for label in labels for each in policy.required_schemes):
        cell: dict[str, Any] = {"subject": label, "scheme": scheme}
        if any(m.subject == label and matches_scheme(m.scheme, scheme) for m in measured):
            message = f"`{label}` was measured under {scheme}, which the policy requires"
            yield required(**cell, outcome="pass", message=message)
            continue
        message = f"`{label}` was not measured under {scheme}, which the policy requires"
        if label in audit.skipped:
            message = f"{scheme} is required of it, and {audit.not_measured(label)}"
        yield missing(**cell, message=message, hint=f"scan with `--schemes {scheme}`, too")


def _incomplete_pick(policy: Policy, audit: GateInput) -> Iterator[Finding]:
    """Warn where a rule is about the pick, and not everything was there to be picked."""
    selectors = {name for rule in policy.rules if rule.level != "off" for name in rule.subjects}
    if not {PICK, SHIPS} & selectors or not audit.skipped or audit.pick is None:
        return
    subject, names = audit.pick.subject, first_of(list(audit.skipped))
    message = (
        f"`{subject}` is the best of what was measured: {names} was planned and is not among it"
    )
    yield Finding(REQUIRED, "warn", subject, None, message, _AGAIN, outcome="inconclusive")


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
    rotten = []
    for ignore in ignores:
        if ignore.until < today:
            what = f"expired on {ignore.until.isoformat()}"
            hint = "fix the breach, or renew the ignore"
        elif ignore.until > latest:
            what = f"holds until {ignore.until.isoformat()}, more than two years ahead"
            hint = f"write a day up to {latest.isoformat()}, and renew it then"
        elif not any(_covers(ignore, check) for check in checks):
            what, hint = "matches nothing that needs it", "remove it"
        else:
            continue
        message = f"the ignore of `{ignore.rule}` in line {ignore.line} {what}: {ignore.reason}"
        scheme = None if ignore.scheme == "*" else ignore.scheme
        rotten.append(Finding("QA027", "warn", ignore.subject, scheme, message, hint))
    marked = (replace(c, ignored=next((i for i in valid if _covers(i, c)), None)) for c in checks)
    return tuple(marked), tuple(rotten)


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


UNANSWERED, REQUIRED = "QA040", "QA025"
_STATUS: dict[str, Status] = {
    "pass": "ship",
    "fail": "hold",
    "inconclusive": "undecided",
    "missing": "incomplete",
    "incomplete": "incomplete",
}
_WORST = ("fail", "missing", "inconclusive", "pass")


def verdict_of(gate: Gate, objective: str) -> Verdict:
    of_classes = [
        c for decision in gate.classes for c in _deciding(_covering(decision, gate.checks))
    ]
    further = [c for c in gate.checks if c.counts and c.outcome != "pass" and c not in of_classes]
    return Verdict(
        policy=gate.policy.name,
        objective=objective,
        confidence=gate.policy.confidence,
        classes=gate.classes,
        status=_STATUS[gate.verdict],
        others=tuple(
            _sentence(check) + (f": {check.hint}" if check.hint and check.outcome != "fail" else "")
            for check in further
        ),
        next_step=gate.next_step,
    )


def unanswered(policy: Policy, audit: GateInput, checks: Sequence[Check]) -> Iterator[Check]:
    """QA040: a class that is asked for, and no rule covers what ships of it, or nothing does."""
    line = policy.line_of_classes
    about = partial(Check, rule=UNANSWERED, name="classes", metric="coverage", line=line)
    missing = partial(about, level="error", subject=SHIPS, scheme=None, outcome="missing")

    def unmeasured(names: str) -> Check:
        message = f"nothing was measured at {names} bits"
        hint = f"scan again with a scheme of {names} bits in `--schemes`"
        return missing(message=message, hint=hint, bit_class=names)

    named = {name: level for name, level in policy.classes.items() if level != "off"}
    measured, of_schemes = set[str](), {*audit.table.class_of.values()}
    for chosen in audit.choices:
        name = chosen.bit_class
        level = "error" if name in audit.bits else named.get(name)
        if chosen.subject is None and name not in of_schemes:
            yield unmeasured(name)  # `--bits` names it
            continue
        measured.add(name)
        if level is not None and not any(map(_answers, _covering(chosen, checks))):
            what = f"`{chosen.subject}` at {chosen.scheme}"
            yield about(
                level=level,
                subject=chosen.subject or SHIPS,
                scheme=chosen.scheme,
                outcome="inconclusive",
                message=f"no rule of the policy covers what ships at {name} bits: {what}",
                hint=f"write a rule about `@ships` with `bits: {name}`, or "
                f"`classes: {{{name}: off}}`",
                bit_class=name,
            )
    required = [name for name, level in named.items() if level == "error"]
    rules = {r.name for r in policy.rules if r.level == "error" and SHIPS in r.subjects}
    if required and not audit.bits and not measured & {*required}:
        yield unmeasured(" or ".join(required))
    elif (
        not audit.bits
        and measured
        and policy.classes
        and not measured & {*named}
        and rules
        and not rules & {check.name for check in checks}
    ):  # no class that was measured is asked for, and rules about what ships decide nothing
        names = " or ".join(sorted(measured))
        message = f"`classes` leaves out {names} bits, so that no rule about `@ships` judges"
        hint = f"name {names} in `classes`, or measure a class that it names"
        yield missing(message=message, hint=hint)


def without_answers(policy: Policy, audit: GateInput, checks: Sequence[Check]) -> Iterator[Check]:
    """QA025: of a chat model, what ships where KL divergence ranks nothing and no answers do."""
    if policy.required_answers == "off" or audit.protocol.get("has_chat_template") is not True:
        return
    for chosen in audit.choices:
        measured = audit.table.find(chosen.subject or "", chosen.scheme or "")
        if measured is None or chosen.kl is None or chosen.kl.estimate >= NEAR_BASELINE:
            continue
        evidence = measured.evidence
        if not evidence.tasks and not evidence.rollouts and _covering(chosen, checks):
            message = (
                f"`{measured.subject}` at {measured.scheme} is below {NEAR_BASELINE} nats, "
                "where KL divergence ranks nothing, and neither tasks nor rollouts were measured"
            )
            hint = "scan with `--tasks NAMES` or `--set rollouts=FOLDER`, or `qaudit import` "
            hint += "answers of both"
            yield _required(policy)(
                level="warn",
                subject=measured.subject,
                scheme=measured.scheme,
                outcome="missing",
                message=message,
                hint=hint,
                bit_class=chosen.bit_class,
            )


def _answers(check: Check) -> bool:
    """Whether a check alone may cover a class; a warning about predictions is beside a rule."""
    if check.rule == REQUIRED:  # only that something was not measured
        return False
    return check.level == "error" or check.record is None or not check.record.of_fidelity


def _covering(chosen: ClassVerdict, checks: Sequence[Check]) -> list[Check]:
    cell = (chosen.subject, chosen.scheme)
    of_class = (c for c in checks if c.bit_class == chosen.bit_class and c.level != "off")
    return [
        check
        for check in of_class
        if check.rule == UNANSWERED
        or chosen.subject is None
        or (check.subject, check.scheme) == cell
    ]


def _level(covering: Sequence[Check]) -> Level:
    return "error" if any(check.level == "error" for check in covering) else "warn"


def _deciding(covering: Sequence[Check]) -> list[Check]:
    """Return the checks that decide, the worst first; what is ignored decides nothing."""
    level = _level(covering)
    checks = [check for check in covering if check.level == level and check.ignored is None]
    checks = [check for check in checks if _answers(check)] or checks
    return sorted(checks, key=lambda check: (_WORST.index(check.outcome), -_nearness(check)))


def _nearness(check: Check) -> float:
    """Return how far the interval reaches beyond the margin, as a fraction of it."""
    if check.interval is None or check.margin is None:
        return 0.0
    is_least = check.record is not None and check.record.at_least
    beyond = check.margin - check.interval.low if is_least else check.interval.high - check.margin
    return beyond / (abs(check.margin) or 1.0)


def _judged(chosen: ClassVerdict, covering: Sequence[Check]) -> ClassVerdict:
    deciding = _deciding(covering)
    worst = next(iter(deciding), None)
    further = [c for c in covering if c not in deciding and c.outcome != "pass" and not c.ignored]
    errors = (c.interval for c in deciding if c.metric == "relative_error" and c.against is None)
    needed = [c.needed_documents for c in deciding if c.outcome == "inconclusive"]
    return replace(
        chosen,
        level=_level(covering),
        status=_STATUS[worst.outcome] if worst else "ship",
        relative_error=next((i for i in errors if i is not None), chosen.relative_error),
        rule=worst.name if worst else None,
        margin=worst.margin if worst else None,
        unit=worst.unit if worst and worst.margin is not None else None,
        metric=worst.metric if worst and worst.margin is not None else None,
        breaches=tuple(_sentence(c) for c in deciding if c.outcome == "fail"),
        needed_documents=None if None in needed else max(filter(None, needed), default=None),
        needs=tuple(
            dict.fromkeys(
                c.hint or c.message for c in deciding if c.outcome not in ("pass", "fail")
            )
        ),
        warnings=tuple(map(_sentence, further)),
    )


def _sentence(check: Check) -> str:
    return f"{check.message} (rule `{check.name}`)"
