"""The checks of a gate as every format shows them, and the document for people.

A check that only warns, or that the policy ignores, has that standing in every format, so that no
surface shows red where the exit code is 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

from qaudit.errors import QauditError
from qaudit.judge.gate import verdict_of
from qaudit.report import document as doc
from qaudit.report import markdown
from qaudit.report.format import NOT_MEASURED, listing, percent, plural, spread
from qaudit.report.verdict import answer
from qaudit.types import Check, CheckStanding, Gate, Interval, bound_of, in_unit

Answer = Gate | QauditError
"""What formats show: a gate, or why there is none."""

TITLE, NO_ANSWER = "qaudit gate", "not judged"
LEFT_OUT = "Left out for length, see `qaudit gate --format json`"
COMMENT_NBYTES = 60_000
"""A pull request comment takes 65,536 characters, and a bot adds some of its own."""

MOST_ROWS, MOST_PASSING = 200, 30
COLUMNS: doc.Columns[Check] = {
    "subject": lambda check: doc.name_cell(check.subject),
    "scheme": lambda check: doc.name_cell(check.scheme) if check.scheme else NOT_MEASURED,
    "outcome": lambda check: word(check),
    "rule": lambda check: check.name,
    "value": lambda check: doc.interval_cell(check.interval, partial(shown, check.unit)),
    "margin": lambda check: doc.cell(margin(check), value=check.margin),
}
WORST_FIRST: dict[CheckStanding, tuple[str, str]] = {  # one of them, and several
    "fail": ("breach", "breaches"),
    "missing": ("not measured", "not measured"),
    "inconclusive": ("inconclusive", "inconclusive"),
    "warning": ("warning", "warnings"),
    "ignored": ("ignored", "ignored"),
    "pass": ("passed", "passed"),
}


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

    def badness(check: Check) -> tuple[int, bool, float, str, str, str]:
        beyond = 0.0
        if check.interval is not None and check.margin is not None:
            beyond = (check.interval.estimate - check.margin) / (abs(check.margin) or 1.0)
            beyond *= -1 if check.record is not None and check.record.at_least else 1
            beyond = math.inf if math.isnan(beyond) else beyond
        place = list(WORST_FIRST).index(standing(check))
        return place, check.known, -beyond, check.rule, check.subject, check.scheme or ""

    return tuple(sorted((check for check in gate.checks if check.level != "off"), key=badness))


def troubles(gate: Gate) -> tuple[Check, ...]:
    return tuple(check for check in worst_first(gate) if standing(check) != "pass")


def counted(gate: Gate) -> str:
    """Print how many checks stand how: `2 breaches, 1 inconclusive and 4 passed`."""
    numbers = Counter(map(standing, worst_first(gate)))
    counts = [
        f"{numbers[k]} {words[numbers[k] != 1]}" for k, words in WORST_FIRST.items() if numbers[k]
    ]
    return listing(counts) if counts else "no check applies"


def shown(unit: str, interval: Interval) -> str:
    if unit == "tokens":
        return in_unit(interval, "tokens")
    show, unit = (percent, "%") if unit == "fraction" else (spread, unit)
    return show(interval, unit=f" {unit}")


def margin(check: Check) -> str:
    if check.margin is None:
        return NOT_MEASURED
    is_least = check.unit != "fraction" and check.record is not None and check.record.at_least
    return "at least " * is_least + bound_of(check.margin, check.unit)


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
    return _ended(message) + (f" {_ended(hint[0].upper() + hint[1:])}" if hint else "")


def _ended(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) or not text else f"{text}."


def headline(gate: Gate) -> str:
    return answer(verdict_of(gate, "loss")).replace("`", "")


def document(gate: Answer, most: int = MOST_ROWS) -> doc.Page:
    """Return the answer, at most so many rows of each kind, and what to do about them."""
    if isinstance(gate, QauditError):
        text = with_hint(gate.message, gate.hint)
        return doc.Page(TITLE, doc.prose(f"{NO_ANSWER.upper()}: {text}"), ())
    bad, verdict = troubles(gate), verdict_of(gate, "loss")
    passing = [check for check in worst_first(gate) if standing(check) == "pass"]
    to_do = [sentence(check) for check in bad[:most]]
    to_do += [f"Warning: {with_hint(w.message, w.hint)}" for w in gate.warnings]
    about = [f"Policy: `{gate.policy.name}`."]
    about += [f"Baseline: `{gate.baseline}`."] if gate.baseline else []
    about += [f"Checks: {counted(gate)}."]
    if gate.at_once > 1:
        level = f"{100 * gate.policy.confidence:g} %"
        about += [f"All {gate.at_once} intervals that decide hold together at {level}."]
    blocks: list[doc.Block] = []
    if step := verdict.next_step:
        bits = listing([f"{name} bits" if name.isdecimal() else name for name in step.bits])
        text = f"This decides {bits} in four of five cases:"
        if step.available is not None and step.available < step.documents:
            has = plural(step.available, "document")
            text = f"The text at hand has {has}: name a longer one with `--evaluation`. {text}"
        blocks += [doc.paragraph(text), doc.CodeBlock(step.command, "sh")]
    blocks.append(doc.paragraph(*about))
    if bad:
        blocks.append(doc.Section("Checks that did not pass", _table(bad, most), 1))
    if to_do:
        items = (doc.bullets(*dict.fromkeys(to_do)), *doc.and_more(len(bad) - most, "line"))
        blocks.append(doc.Section("What to do", items, 2))
    if passing:
        fold = doc.fold(plural(len(passing), "check"), *_table(passing, min(most, MOST_PASSING)))
        blocks.append(doc.Section("Checks that passed", (fold,), 3))
    return doc.Page(TITLE, doc.prose(answer(verdict)), tuple(blocks))


def within(gate: Answer, nbytes: int) -> str:
    """Render Markdown of at most so many bytes: fewer rows, then without whole sections."""
    for most in (MOST_ROWS, 50, 10):
        text = markdown.render(document(gate, most))
        if len(text.encode()) <= nbytes:
            return text
    return markdown.render(document(gate, 10), limit_nbytes=nbytes, left_out_as=LEFT_OUT)


def _table(checks: Sequence[Check], most: int) -> tuple[doc.Block, ...]:
    return (doc.table_of(checks[:most], COLUMNS), *doc.and_more(len(checks) - most, "check"))
