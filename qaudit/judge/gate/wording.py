"""The sentence of a check, with its numbers."""

from __future__ import annotations

import math

from qaudit.judge.gate.questions import Question
from qaudit.types import HELD_OUT, UNIT_OF, Interval, Metric, Unit

HINTS: dict[Metric, str] = {
    "relative_error": "ship another subject or scheme: `qaudit pick` names one",
    "absolute_change": "ship another subject or scheme: `qaudit pick` names one",
    "loss_against_baseline": "ship another subject, or keep the release before",
    "error_against_baseline": "ship another subject: this one is more fragile than the last",
    "accuracy_drop": "ship another subject or scheme: `qaudit pick` names one",
    "soup_against_members": "ship that member, or leave it out of the soup",
}

_SENTENCES: dict[Metric, str] = {
    "relative_error": "{scheme} raises the loss of `{subject}` by {found}{where}",
    "absolute_change": "{scheme} raises the loss of `{subject}` by {found}{where}",
    "loss_against_baseline": "at {scheme} the loss of `{subject}` minus that of the baseline's "
    "`{against}` is {found}{where}",
    "error_against_baseline": "at {scheme} the relative error of `{subject}` minus that of the "
    "baseline's `{against}` is {found}{where}",
    "accuracy_drop": "{scheme} raises the errors of `{subject}` on choices by {found}{where}",
    "soup_against_members": "at {scheme} the loss of `{subject}` minus that of its best member "
    "`{against}` is {found}{where}",
}


def message(question: Question, found: Interval, against: str | None, documents: int) -> str:
    """Return what was measured, on how many documents, and the margin."""
    unit, metric = UNIT_OF[question.rule.metric], question.rule.metric
    chosen = question.split == HELD_OUT and question.columns
    sentence = _SENTENCES[metric].format(
        scheme=question.scheme,
        subject=question.subject,
        against=against,
        found=in_unit(found, unit),
        where=f" on the {documents} documents that it was not chosen on" if chosen else "",
    )
    return f"{sentence}, and the margin is {_margin(question.rule.margin, unit)}"


def in_unit(found: Interval, unit: Unit) -> str:
    """Print an interval in percent or in nats, with two significant digits of its half-width."""
    scale, name = (100.0, "%") if unit == "fraction" else (1.0, "nats per token")
    if found.estimate == found.low == found.high == 0:
        return f"0 {name}"
    digits = _digits(scale * (found.high - found.low) / 2)
    estimate, low, high = (
        f"{scale * v:.{digits}f}" for v in (found.estimate, found.low, found.high)
    )
    return f"{estimate} {name} [{low}, {high}]"


def _digits(half: float) -> int:
    """Return so many decimals that half the width has two digits."""
    if not math.isfinite(half) or half <= 0:
        return 3
    return min(6, max(1, 1 - math.floor(math.log10(half))))


def _margin(margin: float, unit: Unit) -> str:
    return f"{100 * margin:g} %" if unit == "fraction" else f"{margin:g} nats"
