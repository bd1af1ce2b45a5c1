"""The gate as Markdown, for a pull request comment or a step summary.

Such surfaces refuse what is too long as a whole. So the table holds as many checks as its share
of the room takes, worst first, and sections are left out whole, from the end, and named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qaudit.errors import QauditError
from qaudit.report.format import NOT_MEASURED, listing, plural
from qaudit.report.gate.standing import (
    NO_ANSWER,
    counted,
    held_together,
    margin,
    sentence,
    standing,
    troubles,
    value,
    with_hint,
    word,
    worst_first,
)
from qaudit.report.markdown import cell, code, folded, prose
from qaudit.types import Check, Gate

COMMENT_NBYTES = 60_000
"""A comment takes 65,536 characters, and a bot adds some of its own."""

_HEAD = (
    "| outcome | rule | subject | scheme | value | margin |\n| --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True)
class Section:
    """A part that is there as a whole or not at all."""

    name: str
    text: str


def render(gate: Gate) -> str:
    """Render the gate so that it fits into a comment."""
    return within(gate, COMMENT_NBYTES)


def render_failure(error: QauditError) -> str:
    """Say that there is no answer, and why."""
    said = with_hint(error.message[:1].upper() + error.message[1:], error.hint)
    return f"**Gate: {NO_ANSWER}.** {prose(said)}\n"


def within(gate: Gate, nbytes: int) -> str:
    """Render the gate in at most so many bytes."""
    head = f"**Gate: {gate.verdict}.** {counted(gate).capitalize()}.{_held_to(gate)}"
    text = head
    left_out: list[str] = []
    room = nbytes - 300  # for the sentence that names what was left out
    for section in _sections(gate, room // 4):
        longer = f"{text}\n\n{section.text}"
        if left_out or not section.text or len(longer.encode()) > room:
            left_out.append(section.name)
        else:
            text = longer
    if left_out:
        text += f"\n\nLeft out, because it would not fit in here: {listing(left_out)}."
    return text + "\n"


def _held_to(gate: Gate) -> str:
    policy = f" Policy: {code(gate.policy.name)}."
    baseline = f" Baseline: {code(gate.baseline)}." if gate.baseline else ""
    return f"{policy}{baseline} {held_together(gate)}".rstrip()


def _sections(gate: Gate, share: int) -> list[Section]:
    found = troubles(gate)
    passing = [check for check in worst_first(gate) if standing(check) == "pass"]
    sections = []
    if found:
        sections.append(Section("the table", _table(found, share)))
        sections.append(Section("what to do", _items([sentence(c) for c in found], share)))
    if gate.warnings:
        said = [with_hint(w.message, w.hint) for w in gate.warnings]
        sections.append(Section("the warnings", _items(said, share, "Warnings:\n\n")))
    if passing:
        table = folded(f"{plural(len(passing), 'check')} passed", _table(passing, share))
        sections.append(Section("the checks that passed", table))
    return sections


def _table(checks: Sequence[Check], nbytes: int) -> str:
    rows = [_row(check) for check in checks]
    fitting = _fitting(rows, nbytes)
    return "\n".join([_HEAD, *fitting]) + _more(len(rows) - len(fitting), "check")


def _row(check: Check) -> str:
    scheme = cell(check.scheme) if check.scheme else NOT_MEASURED
    parts = (word(check), check.rule, cell(check.subject), scheme, value(check), margin(check))
    return f"| {' | '.join(parts)} |"


def _items(sentences: Sequence[str], nbytes: int, title: str = "") -> str:
    lines = [f"- {prose(text)}" for text in sentences]
    fitting = _fitting(lines, nbytes)
    if not fitting:
        return ""
    return title + "\n".join(fitting) + _more(len(lines) - len(fitting), "line")


def _fitting(lines: Sequence[str], nbytes: int) -> list[str]:
    """Return as many lines, from the first, as so many bytes hold."""
    taken, found = 0, []
    for line in lines:
        taken += len(line.encode()) + 1
        if taken > nbytes:
            break
        found.append(line)
    return found


def _more(number: int, noun: str) -> str:
    return f"\n\nand {plural(number, noun)} more" if number else ""
