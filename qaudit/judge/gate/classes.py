"""What ships of each bit class, by the checks of a policy: ship, hold, undecided, or not judged.

The rules about it decide: those of level `error`, or the warnings where there are no others.
`classes` of a policy and `--bits` name the classes that are asked for. One that no rule covers is
inconclusive where it is asked for, and not judged elsewhere. A class that was not measured is not
asked for, unless `--bits` names it, or none of the classes that count was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from qaudit.judge.gate.audits import SHIPS, GateInput
from qaudit.types import NEAR_BASELINE, Check, ClassVerdict, Gate, Level, Policy, Status, Verdict

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
        others=tuple(_with_hint(check) for check in further),
        next_step=gate.next_step,
    )


def unanswered(policy: Policy, audit: GateInput, checks: Sequence[Check]) -> Iterator[Check]:
    """QA040: a class that is asked for, and no rule covers what ships of it, or nothing does."""
    measured = {chosen.bit_class for chosen in audit.choices if _is_measured(audit, chosen)}
    for chosen in audit.choices:
        name, level = chosen.bit_class, policy.classes.get(chosen.bit_class, "off")
        level = "error" if name in audit.bits else level
        if name not in measured:
            yield _check(policy, name, "error", "missing")  # `--bits` names it
        elif level != "off" and not any(map(_answers, _covering(chosen, checks))):
            yield _check(policy, name, level, "inconclusive", chosen)
    required = [name for name, level in policy.classes.items() if level == "error"]
    if required and not audit.bits and not measured & {*required}:
        yield _check(policy, " or ".join(required), "error", "missing")
    elif measured and not audit.bits and not any(_is_named(policy, name) for name in measured):
        yield from _without_classes(policy, sorted(measured), checks)


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
            yield Check(
                rule=REQUIRED,
                name="required",
                level="warn",
                metric="coverage",
                subject=measured.subject,
                scheme=measured.scheme,
                outcome="missing",
                message=f"`{measured.subject}` at {measured.scheme} is below {NEAR_BASELINE} nats, "
                "where KL divergence ranks nothing, and neither tasks nor rollouts were measured",
                hint="scan with `--tasks NAMES` or `--set rollouts=FOLDER`, or `qaudit import` "
                "answers of both",
                bit_class=chosen.bit_class,
                line=policy.line_of_required,
            )


def _is_named(policy: Policy, name: str) -> bool:
    return policy.classes.get(name, "off") != "off"


def _without_classes(
    policy: Policy, measured: Sequence[str], checks: Sequence[Check]
) -> Iterator[Check]:
    """QA040: no class that was measured is asked for, and rules about what ships decide nothing."""
    rules = {r.name for r in policy.rules if r.level == "error" and SHIPS in r.subjects}
    if policy.classes and rules and not rules & {check.name for check in checks}:
        names = " or ".join(measured)
        message = f"`classes` leaves out {names} bits, so that no rule about `@ships` judges"
        hint = f"name {names} in `classes`, or measure a class that it names"
        check = _check(policy, names, "error", "missing")
        yield replace(check, message=message, hint=hint, bit_class=None)


def _answers(check: Check) -> bool:
    """Whether a check alone may cover a class; a warning about predictions is beside a rule."""
    if check.rule == REQUIRED:  # only that something was not measured
        return False
    return check.level == "error" or check.record is None or not check.record.of_fidelity


def _is_measured(audit: GateInput, chosen: ClassVerdict) -> bool:
    return chosen.subject is not None or chosen.bit_class in audit.class_of.values()


def _check(
    policy: Policy, name: str, level: Level, outcome: str, chosen: ClassVerdict | None = None
) -> Check:
    message = f"nothing was measured at {name} bits"
    hint = f"scan again with a scheme of {name} bits in `--schemes`"
    if chosen is not None:
        what = f"`{chosen.subject}` at {chosen.scheme}"
        message = f"no rule of the policy covers what ships at {name} bits: {what}"
        hint = f"write a rule about `@ships` with `bits: {name}`, or `classes: {{{name}: off}}`"
    return Check(
        rule=UNANSWERED,
        name="classes",
        level=level,
        metric="coverage",
        subject=(chosen and chosen.subject) or "@ships",
        scheme=chosen.scheme if chosen else None,
        outcome="inconclusive" if outcome == "inconclusive" else "missing",
        message=message,
        hint=hint,
        bit_class=name,
        line=policy.line_of_classes,
    )


def class_verdicts(
    policy: Policy, audit: GateInput, checks: Sequence[Check]
) -> Iterator[ClassVerdict]:
    for chosen in audit.choices:
        covering = _covering(chosen, checks)
        yield _judged(chosen, covering) if covering else replace(chosen, status="unjudged")


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
        needed_documents=_needed(deciding),
        needs=tuple(
            dict.fromkeys(
                c.hint or c.message for c in deciding if c.outcome not in ("pass", "fail")
            )
        ),
        warnings=tuple(map(_sentence, further)),
    )


def _needed(deciding: Sequence[Check]) -> int | None:
    """Return the documents that decide every unclear check; None where more do not."""
    needed = [check.needed_documents for check in deciding if check.outcome == "inconclusive"]
    return None if None in needed else max((n for n in needed if n), default=None)


def _with_hint(check: Check) -> str:
    unclear = check.hint and check.outcome != "fail"
    return f"{_sentence(check)}: {check.hint}" if unclear else _sentence(check)


def _sentence(check: Check) -> str:
    return f"{check.message} (rule `{check.name}`)"
