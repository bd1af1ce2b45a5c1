"""The sentence of a check."""

from __future__ import annotations

import math

from qaudit.judge.gate.questions import Question
from qaudit.types import Interval, Unit


def sentence(question: Question, interval: Interval, against: str | None) -> str:
    margin, unit = question.rule.margin, question.record.unit
    text = question.record.sentence.format(
        scheme=question.scheme,
        subject=question.subject,
        against=against,
        change=in_unit(interval, unit),
    )
    if question.rule.strata is not None:
        text += f" in `{against}`, the worst stratum"
    if question.rule.tasks is not None:
        text += f" in `{against}`, the worst task"
    return f"{text}, and the margin is {bound_of(margin, unit)}"


def bound_of(margin: float, unit: Unit) -> str:
    """Print a margin: `2 %`, `1 nat`, `0.5 nats`."""
    if unit == "fraction":
        return f"{100 * margin:g} %"
    return f"{margin:g} {unit.removesuffix('s') if margin == 1 else unit}"


def in_unit(interval: Interval, unit: Unit) -> str:
    """Print an interval in its unit, with two significant digits of its half-width."""
    if unit == "tokens":
        estimate, low, high = (f"{bound:,.0f}" for bound in vars(interval).values())
        named = f"{estimate} tokens" if math.isfinite(interval.estimate) else "more than is written"
        return f"{named} [{low}, {high}]"
    scale, name = (100.0, "%") if unit == "fraction" else (1.0, "nats per token")
    if interval.estimate == interval.low == interval.high == 0:
        return f"0 {name}"
    half, digits = scale * (interval.high - interval.low) / 2, 3
    if math.isfinite(half) and half > 0:
        digits = min(6, max(1, 1 - math.floor(math.log10(half))))
    values = (interval.estimate, interval.low, interval.high)
    estimate, low, high = (f"{scale * value:.{digits}f}" for value in values)
    return f"{estimate} {name} [{low}, {high}]"
