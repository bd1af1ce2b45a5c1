"""Verdicts by hand, and audits that have them."""

from dataclasses import replace

from qaudit.types import ClassVerdict, Interval, Verdict
from tests.support import sample

SOUP, RIVAL = "soup", "stage2-ingredient2-step1000"
SCHEME_OF = {"8": "bnb-int8", "4": "gptq-4bit", "3": "gptq-3bit"}


def class_verdict(bits, status="ship", **more):
    """Return what ships of a class: the soup of the sample, with its numbers there."""
    scheme = SCHEME_OF[bits]
    score = next(s for s in sample.audit().measurements if (s.subject, s.scheme) == (SOUP, scheme))
    settings = {
        "level": "error",
        "subject": SOUP,
        "scheme": scheme,
        "objective": "lowest quantized loss",
        "ce": score.ce,
        "relative_error": score.relative_error,
        "rule": f"{bits}-bit",
        "margin": 0.02,
        "unit": "fraction",
        "runner_up": RIVAL,
        "runner_up_scheme": scheme,
        "lead": Interval(-0.05, -0.07, -0.03),
        **more,
    }
    return ClassVerdict(bits, status=status, **settings)


def verdict(*classes, status=None):
    """Return a verdict under the policy `release`."""
    order = ("hold", "incomplete", "undecided", "ship")
    held = [one.status for one in classes if one.level == "error"]
    worst = status or min(held, key=order.index, default="ship")
    return Verdict("release", "loss", 0.95, classes, worst)


def three():
    """Return a verdict with a class of each status."""
    needs = ("about 322 documents, where 64 were measured",)
    breaches = ("gptq-3bit raises the loss of `soup` by 6.5 % and the margin is 5 %",)
    held = class_verdict("3", "hold", level="warn", breaches=breaches)
    return verdict(class_verdict("8"), class_verdict("4", "undecided", needs=needs), held)


def with_verdict(value=None):
    """Return the sample with a verdict."""
    return replace(sample.audit(), verdict=value or three())
