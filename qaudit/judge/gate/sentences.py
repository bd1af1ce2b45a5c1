"""The sentence of a check, and what to do about a breach."""

from __future__ import annotations

import math

from qaudit.judge.gate.questions import Question
from qaudit.types import HELD_OUT, UNIT_OF, Interval, Metric, Unit

_OTHER = "ship another subject or scheme: `qaudit pick` names one"
HINTS: dict[Metric, str] = {
    "relative_error": _OTHER,
    "absolute_change": _OTHER,
    "loss_against_baseline": "ship another subject, or keep the release before",
    "error_against_baseline": "ship another subject: this one is more fragile than the last",
    "accuracy_drop": _OTHER,
    "soup_against_members": "ship that member, or leave it out of the soup",
    "kl": _OTHER,
    "kl_p999": _OTHER,
    "top1": _OTHER,
    "flips": _OTHER,
}
_SENTENCES: dict[Metric, str] = {
    "relative_error": "{scheme} raises the loss of `{subject}` by {change}{where}",
    "absolute_change": "{scheme} raises the loss of `{subject}` by {change}{where}",
    "loss_against_baseline": "at {scheme} the loss of `{subject}` minus that of the baseline's "
    "`{against}` is {change}{where}",
    "error_against_baseline": "at {scheme} the relative error of `{subject}` minus that of the "
    "baseline's `{against}` is {change}{where}",
    "accuracy_drop": "{scheme} raises the errors of `{subject}` on tasks by {change}{where}",
    "soup_against_members": "at {scheme} the loss of `{subject}` minus that of its best member "
    "`{against}` is {change}{where}",
    "kl": "at {scheme} the KL divergence of `{subject}` to full precision is {change}{where}",
    "kl_p999": "at {scheme} the KL divergence of `{subject}` at one token in a thousand exceeds "
    "{change}{where}",
    "flips": "{scheme} flips {change} of the answers of `{subject}`{where}",
    "top1": "{scheme} changes the likeliest token of `{subject}` at {change} of tokens{where}",
}


def sentence(question: Question, interval: Interval, against: str | None, documents: int) -> str:
    """Return the value beside its margin."""
    metric, margin = question.rule.metric, question.rule.margin
    unit = UNIT_OF[metric]
    half = question.split == HELD_OUT and question.columns
    text = _SENTENCES[metric].format(
        scheme=question.scheme,
        subject=question.subject,
        against=against,
        change=_in_unit(interval, unit),
        where=f" on the {documents} documents that it was not chosen on" if half else "",
    )
    if question.rule.strata is not None:
        text += f" in `{against}`, the worst stratum"
    if question.rule.tasks is not None:
        text += f" in `{against}`, the worst task"
    bound = f"{100 * margin:g} %" if unit == "fraction" else f"{margin:g} nats"
    return f"{text}, and the margin is {bound}"


def _in_unit(interval: Interval, unit: Unit) -> str:
    """Print an interval in percent or in nats, with two significant digits of its half-width."""
    scale, name = (100.0, "%") if unit == "fraction" else (1.0, "nats per token")
    if interval.estimate == interval.low == interval.high == 0:
        return f"0 {name}"
    half, digits = scale * (interval.high - interval.low) / 2, 3
    if math.isfinite(half) and half > 0:
        digits = min(6, max(1, 1 - math.floor(math.log10(half))))
    values = (interval.estimate, interval.low, interval.high)
    estimate, low, high = (f"{scale * value:.{digits}f}" for value in values)
    return f"{estimate} {name} [{low}, {high}]"
