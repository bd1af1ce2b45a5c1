"""The gate for GitHub Actions: annotations on stdout, and Markdown for the step summary.

A step shows ten annotations of each kind and drops the others silently, so that the last place
counts the rest. A breach is an error; a check that is missing, inconclusive or only a warning is a
warning; an ignored one is a notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Literal

from qaudit.errors import QauditError
from qaudit.judge.gate import verdict_of
from qaudit.report import markdown
from qaudit.report.format import printable
from qaudit.report.gate.document import TITLE, failure, within
from qaudit.report.gate.standing import (
    NO_ANSWER,
    counted,
    sentence,
    standing,
    troubles,
    where,
    with_hint,
)
from qaudit.report.verdict import answer
from qaudit.types import Check, Gate

Kind = Literal["error", "warning", "notice"]

MOST_OF_A_KIND = 10
SUMMARY_NBYTES = 1024 * 1024
"""A step's summary; a longer one is dropped as a whole."""


def render(gate: Gate) -> str:
    text = answer(verdict_of(gate, "loss")).replace("`", "")
    notice = command("notice", f"{text} Checks: {counted(gate)}", title=TITLE)
    errors = [c for c in troubles(gate) if standing(c) == "fail"]
    warnings = [c for c in troubles(gate) if standing(c) in ("missing", "inconclusive", "warning")]
    notices = [c for c in troubles(gate) if standing(c) == "ignored"]
    of_the_policy = [
        command(
            "warning",
            with_hint(w.message, w.hint),
            title=f"{w.rule} {gate.policy.name}",
            file=_file(gate),
        )
        for w in gate.warnings
    ]
    lines = [
        *_at_most_ten("error", [_annotation("error", c, gate) for c in errors]),
        *_at_most_ten(
            "warning", [*(_annotation("warning", c, gate) for c in warnings), *of_the_policy]
        ),
        *_at_most_ten("notice", [notice, *(_annotation("notice", c, gate) for c in notices)]),
    ]
    return "\n".join(lines) + "\n"


def render_failure(error: QauditError) -> str:
    text = with_hint(error.message, error.hint)
    return command("error", text, title=f"qaudit gate: {NO_ANSWER}") + "\n"


def step_summary(gate: Gate) -> str:
    """Return Markdown for the file that `GITHUB_STEP_SUMMARY` names."""
    return within(gate, SUMMARY_NBYTES)


def step_summary_of_failure(error: QauditError) -> str:
    return markdown.render(failure(error))


def command(kind: Kind, text: str, *, title: str, file: str | None = None, line: int = 1) -> str:
    """Write a workflow command; no name ends it or begins another."""
    places = {} if file is None else {"file": file, "line": str(max(1, line))}
    properties = {**places, "title": title}
    shown = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{kind} {shown}::{_data(text)}"


def _annotation(kind: Kind, check: Check, gate: Gate) -> str:
    title = f"{check.rule} {where(check)}"
    return command(kind, sentence(check), title=title, file=_file(gate), line=check.line)


def _file(gate: Gate) -> str | None:
    return None if gate.policy.path is None else PurePath(gate.policy.path).as_posix()


def _at_most_ten(kind: Kind, lines: Sequence[str]) -> list[str]:
    if len(lines) <= MOST_OF_A_KIND:
        return list(lines)
    shown = list(lines[: MOST_OF_A_KIND - 1])
    more = len(lines) - len(shown)
    return [*shown, command(kind, f"and {more} more: see the step's summary", title=TITLE)]


def _data(text: str) -> str:
    return printable(text).replace("%", "%25")  # line ends are gone with the control characters


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
