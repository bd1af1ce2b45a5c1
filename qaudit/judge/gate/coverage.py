"""What a policy requires to have been measured, and what a pick was not chosen among."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from qaudit.judge.gate.held import PICK, Held, matches
from qaudit.types import Check, Finding, Policy

REQUIRED = "QA025"


def coverage(policy: Policy, held: Held) -> Iterator[Check]:
    """QA025: every gated subject under every required scheme, and every required subject."""
    for selector in policy.required_subjects:
        found = held.chosen([selector])
        measured = [label for label in found if label not in held.skipped]
        if not measured:
            sentence = f"no subject matches `{selector}`, which the policy requires"
            if found:
                sentence = f"`{selector}` is required, and {_skipped(held, next(iter(found)))}"
            yield _check(policy, selector, None, "missing", sentence, "measure it, too")
    if not policy.required_schemes:
        return
    rules = (rule for rule in policy.rules if rule.level != "off")
    selectors = [*policy.required_subjects, *(name for rule in rules for name in rule.subjects)]
    gated = held.chosen(selectors or [PICK])
    if not gated:
        sentence = "schemes are required, and there is no subject to require them of"
        yield _check(policy, ", ".join(selectors), None, "missing", sentence, "measure one")
    for label in gated:
        for scheme in policy.required_schemes:
            yield _covered(policy, held, label, scheme)


def _covered(policy: Policy, held: Held, label: str, scheme: str) -> Check:
    measured = [m.scheme for m in held.table.measurements if m.subject == label]
    if any(matches(name, scheme) for name in measured):
        sentence = f"`{label}` was measured under {scheme}, which the policy requires"
        return _check(policy, label, scheme, "pass", sentence, "")
    sentence = f"`{label}` was not measured under {scheme}, which the policy requires"
    if label in held.skipped:
        sentence = f"{scheme} is required of it, and {_skipped(held, label)}"
    return _check(
        policy, label, scheme, "missing", sentence, f"scan with `--schemes {scheme}`, too"
    )


def _skipped(held: Held, label: str) -> str:
    return f"`{label}` was planned and not measured: {held.skipped[label]}"


def _check(
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


def incomplete_pick(policy: Policy, held: Held) -> Iterator[Finding]:
    """Warn where a rule is about the pick, and not everybody was there to be picked."""
    about = any(PICK in rule.subjects for rule in policy.rules if rule.level != "off")
    if not about or not held.skipped or held.pick is None:
        return
    names = ", ".join(f"`{label}`" for label in list(held.skipped)[:3])
    more = f" and {len(held.skipped) - 3} more" if len(held.skipped) > 3 else ""
    yield Finding(
        rule=REQUIRED,
        level="warn",
        subject=held.pick.subject,
        scheme=None,
        message=f"`{held.pick.subject}` is the best of what was measured: {names}{more} "
        "was planned and is not among it",
        hint="scan again: what is missing is measured again",
        outcome="inconclusive",
    )
