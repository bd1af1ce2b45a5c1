"""The gate for people, pull requests, test reports and code scanning.

Terminal and Markdown are one document, and JSON follows the published schema
`qaudit/saved/gate.schema.json`, whose names only grow within one version. A failure of the tool
itself is an error in every format that has one, and a finding in none. The format never changes
the exit code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal, cast

from qaudit.errors import QauditError
from qaudit.report import markdown, terminal
from qaudit.report.format import renderer_of
from qaudit.report.gate import machines
from qaudit.report.gate.checks import (
    COMMENT_NBYTES,
    NO_ANSWER,
    WORST_FIRST,
    document,
    failure,
    headline,
    standing,
    with_hint,
    within,
    worst_first,
)
from qaudit.report.gate.machines import COLORS
from qaudit.saved.codec import encode, text_of
from qaudit.types import Gate
from qaudit.version import __version__

__all__ = ["FORMATS", "headline", "render", "render_failure", "step_summary"]

SUMMARY_NBYTES = 1024 * 1024
"""A step's summary; a longer one is dropped as a whole."""


def render(gate: Gate, form: str) -> str:
    return renderer_of(form, {name: of_gate for name, (of_gate, _) in FORMATS.items()})(gate)


def render_failure(error: QauditError, form: str) -> str:
    return renderer_of(form, {name: of_error for name, (_, of_error) in FORMATS.items()})(error)


def step_summary(gate: Gate) -> str:
    """Return Markdown for the file that `GITHUB_STEP_SUMMARY` names."""
    return within(gate, SUMMARY_NBYTES)


def _to_json(gate: Gate) -> str:
    """Write the answer, the policy and every check, worst first."""
    from qaudit.saved.audits import CheckDocument, GateAnswer, IgnoreNote, PolicyName  # slow

    checks, numbers = [], Counter(map(standing, worst_first(gate)))
    for check in worst_first(gate):
        i = check.ignored
        ignored = i and IgnoreNote(i.reason, i.until, i.line)
        checks.append(CheckDocument(**vars(check) | {"ignored": ignored}, standing=standing(check)))
    answer = GateAnswer(
        schema="1",
        qaudit=__version__,
        verdict=gate.verdict,
        exit_code=gate.exit_code,
        policy=PolicyName(gate.policy.name, gate.policy.path),
        confidence=gate.policy.confidence,
        at_once=gate.at_once,
        baseline=gate.baseline,
        targets=gate.targets,
        counts={stands: numbers[stands] for stands in WORST_FIRST},
        checks=tuple(checks),
        classes=gate.classes,
        warnings=gate.warnings,
        next_step=gate.next_step,
        error=None,
    )
    return text_of(encode(answer))


def _failure_to_json(error: QauditError) -> str:
    from qaudit.saved.audits import GateFailure
    from qaudit.saved.parts import Failure

    code = cast(Literal[2, 4, 130], error.code)
    reason = Failure(error.message, error.hint)
    return text_of(encode(GateFailure("1", __version__, "error", code, reason)))


FORMATS: dict[str, tuple[Callable[[Gate], str], Callable[[QauditError], str]]] = {
    "terminal": (
        lambda gate: terminal.render(document(gate)),
        lambda error: terminal.render(failure(error)),
    ),
    "md": (
        lambda gate: within(gate, COMMENT_NBYTES),
        lambda error: markdown.render(failure(error)),
    ),
    "json": (_to_json, _failure_to_json),
    "junit": (machines.junit, machines.junit_of_failure),
    "sarif": (machines.sarif, machines.sarif_of_failure),
    "github": (
        machines.github,
        lambda error: machines.failed(with_hint(error.message, error.hint)),
    ),
    "badge": (
        lambda gate: machines.drawn(machines.status_of(gate), COLORS[gate.verdict]),
        lambda error: machines.drawn(NO_ANSWER, COLORS["error"]),
    ),
    "shields": (
        lambda gate: machines.endpoint(machines.status_of(gate), COLORS[gate.verdict]),
        lambda error: machines.endpoint(NO_ANSWER, COLORS["error"], isError=True),
    ),
}
"""What each format makes of a gate, and of a failure of the tool."""
