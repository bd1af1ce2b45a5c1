"""What all formats share: the standing of a check, the order of checks, and their numbers.

A check that only warns, or that the policy ignores, has that standing in every format, so that no
surface shows red where the exit code is 0.
"""

from __future__ import annotations

import math
from collections import Counter

from qaudit.judge.gate.sentences import bound_of, in_unit
from qaudit.report.format import NOT_MEASURED, listing, or_dash, percent, spread
from qaudit.types import Check, CheckStanding, Gate

WORST_FIRST: tuple[CheckStanding, ...] = (
    "fail", "missing", "inconclusive", "warning", "ignored", "pass",
)  # fmt: skip
_COUNTED: dict[CheckStanding, tuple[str, str]] = {
    "fail": ("1 breach", "{} breaches"),
    "missing": ("1 not measured", "{} not measured"),
    "inconclusive": ("1 inconclusive", "{} inconclusive"),
    "warning": ("1 warning", "{} warnings"),
    "ignored": ("1 ignored", "{} ignored"),
    "pass": ("1 passed", "{} passed"),
}
NO_ANSWER = "not judged"


def standing(check: Check) -> CheckStanding:
    """Return the standing of a check: its outcome, if that counts."""
    if check.outcome == "pass":
        return "pass"
    if check.ignored is not None:
        return "ignored"
    return check.outcome if check.level == "error" else "warning"


def word(check: Check) -> str:
    """Return the standing of a check in a word or two, with its outcome where it does not count."""
    stands = standing(check)
    if stands in ("warning", "ignored"):
        return f"{stands}: {check.outcome}"
    return f"{stands}, known" if stands == "fail" and check.known else stands


def worst_first(gate: Gate) -> tuple[Check, ...]:
    """Order the checks: those that decide, new ones, and the farthest beyond its margin first."""
    judged = (check for check in gate.checks if check.level != "off")
    return tuple(sorted(judged, key=_badness))


def _badness(check: Check) -> tuple[int, bool, float, str, str, str]:
    return (
        WORST_FIRST.index(standing(check)),
        check.known,
        -_beyond(check),
        check.rule,
        check.subject,
        check.scheme or "",
    )


def _beyond(check: Check) -> float:
    """Return how far the estimate is beyond the margin, as a fraction of it."""
    if check.interval is None or check.margin is None:
        return 0.0
    sign = -1 if check.record is not None and check.record.at_least else 1
    beyond = sign * (check.interval.estimate - check.margin) / (abs(check.margin) or 1.0)
    return beyond if not math.isnan(beyond) else math.inf


def troubles(gate: Gate) -> tuple[Check, ...]:
    return tuple(check for check in worst_first(gate) if standing(check) != "pass")


def counted(gate: Gate) -> str:
    """Print how many checks stand how: `2 breaches, 1 inconclusive and 4 passed`."""
    numbers = Counter(map(standing, worst_first(gate)))
    counts = [
        _COUNTED[stands][numbers[stands] != 1].format(numbers[stands])
        for stands in WORST_FIRST
        if numbers[stands]
    ]
    return listing(counts) if counts else "no check applies"


def held_together(gate: Gate) -> str:
    """Return the level at which several intervals hold together."""
    if gate.at_once < 2:
        return ""
    level = f"{100 * gate.policy.confidence:g} %"
    return f"All {gate.at_once} intervals that decide hold together at {level}."


def value(check: Check) -> str:
    if check.unit == "fraction":
        return or_dash(check.interval, lambda interval: percent(interval, unit=" %"))
    if check.unit == "tokens":
        return or_dash(check.interval, lambda interval: in_unit(interval, "tokens"))
    return or_dash(check.interval, lambda interval: spread(interval, unit=f" {check.unit}"))


def margin(check: Check) -> str:
    if check.margin is None:
        return NOT_MEASURED
    least = "at least " if check.record is not None and check.record.at_least else ""
    return f"{least if check.unit != 'fraction' else ''}{bound_of(check.margin, check.unit)}"


def where(check: Check) -> str:
    return f"{check.subject} at {check.scheme}" if check.scheme else check.subject


def sentence(check: Check) -> str:
    """Return the result of a check, why it may not count, and what to do; names in backticks."""
    text = _ended(check.message)
    if check.ignored is not None and check.outcome != "pass":
        text += f" Ignored until {check.ignored.until.isoformat()}: {_ended(check.ignored.reason)}"
    elif check.known and check.outcome == "fail":
        text += " The baseline breaches it, too."
    return text if standing(check) in ("pass", "ignored") else with_hint(text, check.hint)


def with_hint(message: str, hint: str) -> str:
    """Join a message and a hint as two sentences."""
    advice = f" {_ended(hint[0].upper() + hint[1:])}" if hint else ""
    return f"{_ended(message)}{advice}"


def _ended(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) or not text else f"{text}."
