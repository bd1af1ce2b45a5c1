"""The gate as SARIF 2.1.0, for code scanning and other viewers of static analysis.

A check has no line of source, so its result points at the rule in the policy file, as OpenSSF's
scorecard does; under a preset it points at the preset's file in the package, which a viewer shows
without its text. Code scanning wants a file of the repository: commit the policy and name it.

Only a breach is of kind `fail`. A check that is missing or inconclusive is `open`, whose level is
`none` by the standard; passing checks are left out, since viewers list every result as an alert. A
fingerprint depends on the check and on no number, so that an alert stays the same from run to run.
A failure of the tool is in `invocations`, without results; do not upload that file, or code
scanning closes the alerts of the previous run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from qaudit.errors import QauditError
from qaudit.report.format import printable
from qaudit.report.gate.standing import sentence, troubles, with_hint
from qaudit.saved.codec import text_of
from qaudit.types import CODES, Check, Code, Finding, Gate, Policy, digest
from qaudit.version import __version__

MOST_RESULTS = 5_000
"""What code scanning shows of a file; the worst come first."""

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_PAGE = "https://pypi.org/project/qaudit-llm/"
_UNKNOWN = Code("a rule of the policy", "The policy asks for it.")


def render(gate: Gate) -> str:
    reported: list[Check | Finding] = [*troubles(gate), *gate.warnings]
    codes = sorted({each.rule for each in reported})
    invocation: dict[str, Any] = {"executionSuccessful": True, "exitCode": gate.exit_code}
    if (more := len(reported) - MOST_RESULTS) > 0:
        invocation["toolExecutionNotifications"] = [
            _notification(f"{more} results more are left out", "note")
        ]
    results = [
        _check(each, gate, codes) if isinstance(each, Check) else _warning(each, gate, codes)
        for each in reported[:MOST_RESULTS]
    ]
    return _document(invocation, results, codes)


def render_failure(error: QauditError) -> str:
    invocation = {
        "executionSuccessful": False,
        "exitCode": error.code,
        "toolExecutionNotifications": [
            _notification(with_hint(error.message, error.hint), "error")
        ],
    }
    return _document(invocation, [], [])


def _document(
    invocation: dict[str, Any], results: list[dict[str, Any]], codes: Sequence[str]
) -> str:
    driver = {
        "name": "qaudit",
        "version": __version__,
        "informationUri": _PAGE,
        "rules": [_rule(code) for code in codes],
    }
    run = {"tool": {"driver": driver}, "invocations": [invocation], "results": results}
    return text_of({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})


def _notification(text: str, level: str) -> dict[str, Any]:
    return {"level": level, "message": {"text": _safe(text)}}


def _rule(code: str) -> dict[str, Any]:
    rule = CODES.get(code, _UNKNOWN)
    return {
        "id": code,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": f"{rule.title[0].upper()}{rule.title[1:]}. {rule.help}"},
        "help": {"text": rule.help, "markdown": rule.help},
        "defaultConfiguration": {"level": "error"},
        "properties": {"tags": ["quantization"], "precision": "high"},
    }


def _check(check: Check, gate: Gate, codes: Sequence[str]) -> dict[str, Any]:
    failed = check.outcome == "fail"
    level = {"error": "error", "warn": "warning"}.get(check.level, "note")
    interval = check.interval
    identity = [check.rule, check.name, check.metric, check.subject, check.scheme]
    row = _result(check, gate, codes, sentence(check), identity)
    row |= {"kind": "fail" if failed else "open", "level": level if failed else "none"}
    row["locations"] = [_location(gate.policy, check.line, check.subject, check.scheme)]
    row["suppressions"] = _suppressions(check)
    row["properties"] = {
        "outcome": check.outcome,
        "estimate": interval and interval.estimate,
        "low": interval and interval.low,
        "high": interval and interval.high,
        "margin": check.margin,
        "unit": check.unit,
        "documents": check.documents,
    }
    if gate.baseline is not None and check.known:
        row["baselineState"] = "unchanged"
    return row


def _warning(finding: Finding, gate: Gate, codes: Sequence[str]) -> dict[str, Any]:
    identity = [finding.rule, finding.subject, finding.scheme, finding.message]
    return _result(finding, gate, codes, with_hint(finding.message, finding.hint), identity)


def _result(
    source: Check | Finding, gate: Gate, codes: Sequence[str], text: str, identity: list[str | None]
) -> dict[str, Any]:
    """Return the common part of results; each is a warning unless a check replaces that."""
    key = digest(identity)
    row = {
        "ruleId": source.rule,
        "ruleIndex": codes.index(source.rule),
        "kind": "fail",
        "level": "warning",
        "message": {"text": _safe(text)},
        "locations": [_location(gate.policy, 1, source.subject, source.scheme)],
        # The second is the name that code scanning looks for.
        "partialFingerprints": {"qauditCheck/v1": key, "primaryLocationLineHash": f"{key[:16]}:1"},
        "suppressions": [],
    }
    if gate.baseline is not None:
        row["baselineState"] = "new"
    return row


def _suppressions(check: Check) -> list[dict[str, Any]]:
    """Return the reason of an ignored result; an empty list where it is not ignored."""
    if check.ignored is None:
        return []
    reason = f"{check.ignored.reason} (until {check.ignored.until.isoformat()})"
    return [{"kind": "external", "status": "accepted", "justification": _safe(reason)}]


def _location(policy: Policy, line: int, subject: str, scheme: str | None) -> dict[str, Any]:
    names = [{"name": printable(subject), "kind": "object"}] if subject else []
    names += [{"name": printable(scheme), "kind": "member"}] if scheme else []
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": policy_uri(policy)},
            "region": {"startLine": max(1, line)},
        },
        "logicalLocations": names,
    }


def policy_uri(policy: Policy) -> str:
    """Return the path of the policy, relative to the repository if it was given so."""
    if policy.path is None:
        return quote(f"qaudit/policy/presets/{policy.name}.yaml")
    path = PurePath(policy.path)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())


def _safe(text: str) -> str:
    """Return text in which no name makes a link, which SARIF's plain text knows."""
    return printable(text).replace("](", "] (")
