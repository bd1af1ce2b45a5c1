"""A gate with every way a check can stand, by names that try to be markup."""

from dataclasses import replace
from datetime import date

from qaudit.types import Check, Finding, Gate, Ignore, Interval, Policy, PolicyRule

HOSTILE = "</table><script>alert(1)</script>|[x](http://evil.example)`"
HOSTILE += "\x1b[2J\n::error::owned,a:b%0A"

RULE = PolicyRule("four-bit", "relative_error", 0.02, line=4)
POLICY = Policy(name="house", rules=(RULE,), path="ci/our policy.yaml", known="error")


def check(**changes):
    """Return a check that fails, with whatever is changed."""
    plain = Check(
        rule="QA001",
        name="four-bit",
        level="error",
        metric="relative_error",
        subject="soup",
        scheme="gptq-4bit",
        outcome="fail",
        message="gptq-4bit raises the loss of `soup` by 3.1 % [2.6, 3.6], the margin is 2 %",
        hint="ship another subject, or say in the policy why this is acceptable",
        interval=Interval(0.031, 0.026, 0.036),
        margin=0.02,
        documents=64,
        line=4,
    )
    return replace(plain, **changes)


IGNORE = Ignore("four-bit", "the customer ships rtn | by contract", date(2027, 3, 1), line=22)

FAILS = check()
KNOWN = check(subject="stage1-step5000", known=True, interval=Interval(0.09, 0.08, 0.1))
INCONCLUSIVE = check(
    scheme="awq-4bit",
    outcome="inconclusive",
    message="awq-4bit raises the loss of `soup` by 2.1 % [1.6, 2.6], the margin is 2 %",
    hint="needs about 240 documents to decide; 64 were measured",
    interval=Interval(0.021, 0.016, 0.026),
    line=9,
)
MISSING = check(
    rule="QA025",
    name="coverage",
    metric="coverage",
    scheme="bnb-nf4",
    outcome="missing",
    message="`soup` was not measured at bnb-nf4",
    hint="scan it again with `--schemes bnb-nf4`",
    interval=None,
    margin=None,
    documents=0,
    line=2,
)
IGNORED = check(scheme="rtn-4bit", ignored=IGNORE)
OVER = Interval(0.128, 0.119, 0.137)
WARNS = check(name="three-bit", scheme="gptq-3bit", level="warn", interval=OVER, margin=0.08)
PASSES = check(scheme="bnb-fp4", outcome="pass", interval=Interval(0.012, 0.009, 0.015), hint="")
NATS = check(
    rule="QA021",
    name="no-worse",
    metric="loss_against_baseline",
    scheme="gptq-3bit",
    outcome="pass",
    unit="nats",
    interval=Interval(-0.0521, -0.0712, -0.032),
    margin=0.01,
    against="soup",
    hint="",
)
STALE = Finding(
    rule="QA027",
    level="warn",
    subject="*",
    scheme=None,
    message="the ignore of `QA020` in line 30 has expired on 2026-01-31",
    hint="remove it, or give it a new day and a reason",
)


def gate(*checks, **changes):
    """Return a gate with these checks, or with one of every kind."""
    every = (PASSES, IGNORED, WARNS, INCONCLUSIVE, KNOWN, MISSING, FAILS, NATS)
    plain = Gate(
        policy=POLICY,
        checks=checks or every,
        warnings=(STALE,) if not checks else (),
        targets=("demo",),
        baseline="org/model@v1" if not checks else None,
        at_once=6 if not checks else 1,
    )
    return replace(plain, **changes)


def hostile():
    """Return a gate whose every name comes from somebody who means harm."""
    said = f"gptq-4bit raises the loss of `{HOSTILE}`"
    bad = check(subject=HOSTILE, scheme=HOSTILE, name=HOSTILE, message=said, hint=HOSTILE)
    ignored = replace(bad, ignored=replace(IGNORE, reason=HOSTILE))
    policy = replace(POLICY, name=HOSTILE, path=None)
    warning = replace(STALE, message=HOSTILE, hint=HOSTILE, subject=HOSTILE)
    return Gate(policy, (bad, ignored), (warning,), (HOSTILE,), HOSTILE)


def crowd(number):
    """Return a gate with so many breaches, each larger than the one before."""
    centres = ((k, 0.03 + k / 100) for k in range(number))
    return gate(*(
        check(subject=f"step{k}", interval=Interval(at, at - 0.005, 0.035 + k)) for k, at in centres
    ))  # fmt: skip
