"""The gate for people, pull requests, test reports and code scanning.

Terminal and Markdown are one document; each format for machines is a module. A failure of the tool
itself goes through `render_failure`: it is an error in every format that has one, and a finding in
none. The format never changes the exit code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from qaudit.errors import QauditError, UsageError
from qaudit.report import markdown, terminal
from qaudit.report.gate import badge, github, json, junit, sarif
from qaudit.report.gate.document import COMMENT_NBYTES, document, failure, within
from qaudit.report.gate.github import step_summary, step_summary_of_failure
from qaudit.types import Gate

FORMATS: dict[str, Callable[[Gate], str]] = {
    "terminal": lambda gate: terminal.render(document(gate)),
    "md": lambda gate: within(gate, COMMENT_NBYTES),
    "json": json.render,
    "junit": junit.render,
    "sarif": sarif.render,
    "github": github.render,
    "badge": badge.render,
    "shields": badge.render_endpoint,
}

_FAILURES: dict[str, Callable[[QauditError], str]] = {
    "terminal": lambda error: terminal.render(failure(error)),
    "md": lambda error: markdown.render(failure(error)),
    "json": json.render_failure,
    "junit": junit.render_failure,
    "sarif": sarif.render_failure,
    "github": github.render_failure,
    "badge": badge.render_failure,
    "shields": badge.render_endpoint_of_failure,
}

_Value = TypeVar("_Value")

__all__ = ["FORMATS", "render", "render_failure", "step_summary", "step_summary_of_failure"]


def render(gate: Gate, form: str) -> str:
    """Render a gate in one of the formats."""
    return _known(form, FORMATS)(gate)


def render_failure(error: QauditError, form: str) -> str:
    """Render that there is no answer, and why."""
    return _known(form, _FAILURES)(error)


def _known(form: str, among: Mapping[str, Callable[[_Value], str]]) -> Callable[[_Value], str]:
    if form not in among:
        raise UsageError(f"there is no format `{form}`", hint=f"one of {', '.join(among)}")
    return among[form]
