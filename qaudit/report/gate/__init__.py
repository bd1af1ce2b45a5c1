"""The gate for people, pull requests, test reports and code scanning.

Terminal and Markdown are one document, and JSON follows the published schema
`qaudit/saved/gate.schema.json`, whose names only grow within one version. A failure of the tool
itself goes through `render_failure`: it is an error in every format that has one, and a finding in
none. The format never changes the exit code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, cast

from qaudit.errors import QauditError
from qaudit.report import markdown, terminal
from qaudit.report.format import renderer_of
from qaudit.report.gate import badge, github, junit, sarif
from qaudit.report.gate.document import COMMENT_NBYTES, document, failure, headline, within
from qaudit.report.gate.github import step_summary, step_summary_of_failure
from qaudit.report.gate.standing import WORST_FIRST, standing, worst_first
from qaudit.saved.codec import encode, text_of
from qaudit.types import Check, Gate
from qaudit.version import __version__

if TYPE_CHECKING:
    from qaudit.saved.documents import CheckDocument

__all__ = [
    "FORMATS", "headline", "render", "render_failure", "step_summary", "step_summary_of_failure",
]  # fmt: skip


def render(gate: Gate, form: str) -> str:
    return renderer_of(form, FORMATS)(gate)


def render_failure(error: QauditError, form: str) -> str:
    return renderer_of(form, _FAILURES)(error)


def _to_json(gate: Gate) -> str:
    """Write the answer, the policy and every check, worst first."""
    from qaudit.saved.documents import GateAnswer, PolicyName  # slow to load

    checks = worst_first(gate)
    numbers = Counter(map(standing, checks))
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
        checks=tuple(map(_check, checks)),
        classes=gate.classes,
        warnings=gate.warnings,
        next_step=gate.next_step,
        error=None,
    )
    return text_of(encode(answer))


def _check(check: Check) -> CheckDocument:
    from qaudit.saved.documents import CheckDocument, IgnoreNote

    ignored = check.ignored and IgnoreNote(
        check.ignored.reason, check.ignored.until, check.ignored.line
    )
    return CheckDocument(**{**vars(check), "ignored": ignored}, standing=standing(check))


def _failure_to_json(error: QauditError) -> str:
    from qaudit.saved.documents import Failure, GateFailure

    code = cast(Literal[2, 4, 130], error.code)
    reason = Failure(error.message, error.hint)
    return text_of(encode(GateFailure("1", __version__, "error", code, reason)))


FORMATS: dict[str, Callable[[Gate], str]] = {
    "terminal": lambda gate: terminal.render(document(gate)),
    "md": lambda gate: within(gate, COMMENT_NBYTES),
    "json": _to_json,
    "junit": junit.render,
    "sarif": sarif.render,
    "github": github.render,
    "badge": badge.render,
    "shields": badge.render_endpoint,
}

_FAILURES: dict[str, Callable[[QauditError], str]] = {
    "terminal": lambda error: terminal.render(failure(error)),
    "md": lambda error: markdown.render(failure(error)),
    "json": _failure_to_json,
    "junit": junit.render_failure,
    "sarif": sarif.render_failure,
    "github": github.render_failure,
    "badge": badge.render_failure,
    "shields": badge.render_endpoint_of_failure,
}
