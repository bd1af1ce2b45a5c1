"""The gate as JSON, by the published schema `qaudit/saved/gate.schema.json`.

Names are only ever added within one version. An interval that has no bound has null there.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, cast

from qaudit import __version__
from qaudit.errors import QauditError
from qaudit.report.gate.standing import WORST_FIRST, standing, worst_first
from qaudit.saved.codec import encode, text_of
from qaudit.saved.documents import (
    CheckDocument,
    Failure,
    GateAnswer,
    GateFailure,
    IgnoreNote,
    PolicyName,
)
from qaudit.types import Check, Gate, Ignore


def render(gate: Gate) -> str:
    """Write the answer, the policy and every check, worst first."""
    numbers = Counter(map(standing, worst_first(gate)))
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
        checks=tuple(map(_check, worst_first(gate))),
        warnings=gate.warnings,
        error=None,
    )
    return text_of(encode(answer))


def render_failure(error: QauditError) -> str:
    """Write that there is no answer, and why."""
    code = cast(Literal[2, 4, 130], error.exit_code)
    failure = Failure(error.message, error.hint)
    return text_of(encode(GateFailure("1", __version__, "error", code, failure)))


def _check(check: Check) -> CheckDocument:
    ignored = None if check.ignored is None else _ignore(check.ignored)
    return CheckDocument(**{**vars(check), "ignored": ignored}, standing=standing(check))


def _ignore(ignore: Ignore) -> IgnoreNote:
    return IgnoreNote(ignore.reason, ignore.until, ignore.line)
