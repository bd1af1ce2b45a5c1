"""The gate in 80 columns of plain text: the answer, a table, what to do."""

from __future__ import annotations

import textwrap

from qaudit.errors import QauditError
from qaudit.report.format import NOT_MEASURED, plural, printable, shortened
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
from qaudit.types import Check, Gate

WIDTH = 80
LONGEST_SCHEME = 14
SHORTEST_SUBJECT = 9
MOST_PASSING = 30
HEAD = ("outcome", "rule", "subject", "scheme", "value", "margin")


def render(gate: Gate) -> str:
    """Render the answer, the checks and what to do about those that did not pass."""
    parts = [_filled(f"{gate.verdict.upper()}: {counted(gate)}.{_held_to(gate)}")]
    if worst_first(gate):
        parts.append(_table(gate))
    if together := held_together(gate):
        parts.append(_filled(together))
    parts += [_item(sentence(check)) for check in troubles(gate)]
    parts += [_item(f"Warning: {with_hint(w.message, w.hint)}") for w in gate.warnings]
    return "\n\n".join(parts) + "\n"


def render_failure(error: QauditError) -> str:
    """Say that there is no answer, and why."""
    return _filled(f"{NO_ANSWER.upper()}: {with_hint(error.message, error.hint)}") + "\n"


def _held_to(gate: Gate) -> str:
    policy = f" Policy: {gate.policy.name}."
    return policy + (f" Baseline: {gate.baseline}." if gate.baseline else "")


def _filled(text: str) -> str:
    return textwrap.fill(printable(text.replace("`", "")), WIDTH)


def _item(text: str) -> str:
    plain = printable(text.replace("`", ""))
    return textwrap.fill(plain, WIDTH, initial_indent="- ", subsequent_indent="  ")


def _table(gate: Gate) -> str:
    """Set the checks in columns; the subjects take the room that is left, shortened if need be."""
    shown = [check for check in worst_first(gate) if standing(check) != "pass"]
    passing = [check for check in worst_first(gate) if standing(check) == "pass"]
    shown += passing[:MOST_PASSING]
    columns = [list(column) for column in zip(HEAD, *map(_row, shown), strict=True)]
    taken = sum(_width(column) for k, column in enumerate(columns) if k != 2) + len(HEAD) - 1
    room = max(SHORTEST_SUBJECT, WIDTH - taken)
    columns[2] = [shortened(cell, room) for cell in columns[2]]
    widths = [_width(column) for column in columns]
    lines = [
        " ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]
    if more := len(passing) - MOST_PASSING:
        lines += [f"and {plural(more, 'check')} more that pass"] if more > 0 else []
    return "\n".join(lines)


def _row(check: Check) -> tuple[str, ...]:
    return (
        word(check),
        check.rule,
        printable(check.subject),
        shortened(printable(check.scheme or NOT_MEASURED), LONGEST_SCHEME),
        value(check),
        margin(check),
    )


def _width(column: list[str]) -> int:
    return max(map(len, column))
