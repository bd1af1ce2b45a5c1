"""The gate as JSON, by the published schema `gate.schema.json` beside this file.

Names are only ever added within one version. An interval that has no bound has null there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from qaudit import __version__
from qaudit.errors import QauditError
from qaudit.report.gate.standing import WORST_FIRST, standing, worst_first
from qaudit.saved.codec import encode, text_of
from qaudit.types import Check, Gate, Ignore

SCHEMA = "1"


def render(gate: Gate) -> str:
    """Write the answer, the policy and every check, worst first."""
    numbers = Counter(map(standing, worst_first(gate)))
    return text_of(
        {
            **_head(gate.verdict, gate.exit_code),
            "policy": {"name": gate.policy.name, "path": gate.policy.path},
            "confidence": gate.policy.confidence,
            "at_once": gate.at_once,
            "baseline": gate.baseline,
            "targets": gate.targets,
            "counts": {stands: numbers[stands] for stands in WORST_FIRST},
            "checks": [_check(check) for check in worst_first(gate)],
            "warnings": [encode(warning) for warning in gate.warnings],
            "error": None,
        }
    )


def render_failure(error: QauditError) -> str:
    """Write that there is no answer, and why."""
    said = {"message": error.message, "hint": error.hint}
    return text_of({**_head("error", error.exit_code), "error": said})


def _head(verdict: str, exit_code: int) -> dict[str, Any]:
    return {"schema": SCHEMA, "qaudit": __version__, "verdict": verdict, "exit_code": exit_code}


def _check(check: Check) -> dict[str, Any]:
    row = encode(check)
    row["ignored"] = None if check.ignored is None else _ignore(check.ignored)
    return {**row, "standing": standing(check)}


def _ignore(ignore: Ignore) -> dict[str, Any]:
    return {"reason": ignore.reason, "until": ignore.until.isoformat(), "line": ignore.line}
