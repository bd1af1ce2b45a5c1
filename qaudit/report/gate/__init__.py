"""The gate for people, pull requests, test reports and code scanning.

Terminal and Markdown are one document, and JSON follows the published schema
`qaudit/saved/gate.schema.json`, whose names only grow within one version. A failure of the tool
itself is an error in every format that has one, and a finding in none. The format never changes
the exit code.

JUnit. Each check is a test case. Only a breach is a failure: a check that is missing, inconclusive
or only a warning is skipped, with the reason, since calling it failed would claim a finding that
the audit does not have. The job is red all the same, by its exit code. Jenkins reads the attribute
`message`, GitLab the text of the element; both are there. Names hold no number that is measured,
so that GitLab can pair a check with the one of the target branch.

SARIF 2.1.0. A check has no line of source, so its result points at the rule in the policy file, as
OpenSSF's scorecard does; under a preset at the preset's file in the package. Only a breach is of
kind `fail`; a check that is missing or inconclusive is `open`, whose level is `none` by the
standard; passing checks are left out, since viewers list every result as an alert. A fingerprint
depends on no number, so that an alert stays the same from run to run. A failure of the tool is in
`invocations`, without results; do not upload that file, or code scanning closes earlier alerts.

GitHub. A step shows ten annotations of each kind and drops the others silently, so that the last
place counts the rest.

Badges. No font is loaded: widths are estimated, and `textLength` makes the text fit. The answer is
in words and in the title, never in the color alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import PurePath
from typing import Any, Literal, cast
from urllib.parse import quote
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from qaudit.errors import QauditError
from qaudit.judge.gate import verdict_of
from qaudit.report import terminal
from qaudit.report.format import pixels_of, printable, renderer_of
from qaudit.report.gate.checks import (
    COMMENT_NBYTES,
    NO_ANSWER,
    TITLE,
    WORST_FIRST,
    Answer,
    counted,
    document,
    headline,
    sentence,
    standing,
    troubles,
    where,
    with_hint,
    within,
    word,
    worst_first,
)
from qaudit.report.html import element
from qaudit.report.html import text as words
from qaudit.saved.codec import encode, text_of
from qaudit.types import CODES, Check, Code, Finding, Gate, Policy, digest
from qaudit.version import __version__

SUMMARY_NBYTES = 1024 * 1024
"""A step's summary; a longer one is dropped as a whole."""


def render(answer: Answer, form: str) -> str:
    return renderer_of(form, FORMATS)(answer)


def step_summary(answer: Answer) -> str:
    """Return Markdown for the file that `GITHUB_STEP_SUMMARY` names."""
    return within(answer, SUMMARY_NBYTES)


def _json(gate: Answer) -> str:
    """Write the answer, the policy and every check, worst first."""
    from qaudit.saved import audits as saved  # slow
    from qaudit.saved.parts import Failure

    if isinstance(gate, QauditError):
        code = cast(Literal[2, 4, 130], gate.code)
        reason = Failure(gate.message, gate.hint)
        return text_of(encode(saved.GateFailure("1", __version__, "error", code, reason)))
    checks, numbers = [], Counter(map(standing, worst_first(gate)))
    for check in worst_first(gate):
        i = check.ignored
        known = vars(check) | {"ignored": i and saved.IgnoreNote(i.reason, i.until, i.line)}
        checks.append(saved.CheckDocument(**known, standing=standing(check)))
    names = [field.name for field in fields(saved.GateAnswer) if hasattr(gate, field.name)]
    own: dict[str, Any] = {name: getattr(gate, name) for name in names} | {
        "policy": saved.PolicyName(gate.policy.name, gate.policy.path),
        "confidence": gate.policy.confidence,
        "counts": {stands: numbers[stands] for stands in WORST_FIRST},
        "checks": tuple(checks),
    }
    return text_of(encode(saved.GateAnswer(schema="1", qaudit=__version__, error=None, **own)))


# ------------------------------------------------------------------------------- JUnit


def _junit(gate: Answer) -> str:
    if isinstance(gate, QauditError):
        counts = {"tests": "1", "failures": "0", "errors": "1", "skipped": "0"}
        suite = Element("testsuite", {"name": "qaudit gate", **counts})
        case = SubElement(suite, "testcase", name="judge the audit", classname="qaudit")
        message = printable(gate.message)
        reason = SubElement(case, "error", type=type(gate).__name__, message=message)
        reason.text = f"{message}\n{printable(gate.hint)}".rstrip()
    else:
        suite = _suite(gate)
    counts = {name: suite.get(name, "") for name in ("tests", "failures", "errors")}
    top = Element("testsuites", {"name": "qaudit", **counts})
    top.append(suite)
    indent(top)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(top, "unicode")}\n'


def _suite(gate: Gate) -> Element:
    checks, seen = worst_first(gate), Counter[str]()
    kinds = ["failure" if standing(c) == "fail" else "skipped" for c in checks]
    counts = Counter(k for k, c in zip(kinds, checks, strict=True) if standing(c) != "pass")
    suite = Element(
        "testsuite",
        name=f"qaudit gate: {printable(gate.policy.name)}",
        tests=str(len(checks)),
        failures=str(counts["failure"]),
        errors="0",
        skipped=str(counts["skipped"]),
    )
    if gate.policy.path:
        suite.set("file", printable(gate.policy.path))
    properties = SubElement(suite, "properties")
    values = {
        "verdict": gate.verdict,
        "exit_code": str(gate.exit_code),
        "checks": counted(gate),
        "baseline": gate.baseline or "",
        "targets": ", ".join(gate.targets),
        "qaudit": __version__,
    }
    for name, value in values.items():
        SubElement(properties, "property", name=name, value=printable(value))
    for kind, check in zip(kinds, checks, strict=True):
        name, text = printable(f"{check.name}: {where(check)}"), printable(sentence(check))
        seen[key := f"{check.rule} {name}"] += 1
        name += f" ({seen[key]})" if seen[key] > 1 else ""  # GitLab drops the second of a name
        case = SubElement(suite, "testcase", name=name, classname=f"qaudit.{check.rule}")
        if standing(check) == "pass":
            SubElement(case, "system-out").text = text
            continue
        text = text if kind == "failure" else f"{word(check)}: {text}"
        SubElement(case, kind, type=check.rule, message=text).text = text
    if gate.warnings:
        warnings = (printable(with_hint(w.message, w.hint)) for w in gate.warnings)
        SubElement(suite, "system-err").text = "\n".join(warnings)
    return suite


# ------------------------------------------------------------------------------- SARIF

MOST_RESULTS = 5_000
"""What code scanning shows of a file; the worst come first."""

_PAGE = "https://pypi.org/project/qaudit-llm/"
_UNKNOWN = Code("a rule of the policy", "The policy asks for it.")


def _sarif(gate: Answer) -> str:
    results: list[dict[str, Any]] = []
    codes: list[str] = []
    if isinstance(gate, QauditError):
        invocation: dict[str, Any] = {"executionSuccessful": False, "exitCode": gate.code}
        level, text = "error", with_hint(gate.message, gate.hint)
    else:
        invocation = {"executionSuccessful": True, "exitCode": gate.exit_code}
        reported: list[Check | Finding] = [*troubles(gate), *gate.warnings]
        more = len(reported) - MOST_RESULTS
        level, text = "note", f"{more} results more are left out" if more > 0 else ""
        codes = sorted({each.rule for each in reported})
        results = [
            _result(each, gate) | {"ruleIndex": codes.index(each.rule)}
            for each in reported[:MOST_RESULTS]
        ]
    if text:
        note = {"level": level, "message": {"text": _unlinked(text)}}
        invocation["toolExecutionNotifications"] = [note]
    driver: dict[str, Any] = {"name": "qaudit", "version": __version__, "informationUri": _PAGE}
    driver["rules"] = [
        {
            "id": code,
            "shortDescription": {"text": rule.title},
            "fullDescription": {"text": f"{rule.title[0].upper()}{rule.title[1:]}. {rule.help}"},
            "help": {"text": rule.help, "markdown": rule.help},
            "defaultConfiguration": {"level": "error"},
            "properties": {"tags": ["quantization"], "precision": "high"},
        }
        for code, rule in ((code, CODES.get(code, _UNKNOWN)) for code in codes)
    ]
    run = {"tool": {"driver": driver}, "invocations": [invocation], "results": results}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return text_of({"$schema": schema, "version": "2.1.0", "runs": [run]})


def _result(of: Check | Finding, gate: Gate) -> dict[str, Any]:
    """Return a check as a result; a warning of the policy itself is one without numbers."""
    identity, text = [of.rule, of.subject, of.scheme, of.message], with_hint(of.message, of.hint)
    line, known = 1, False
    if isinstance(of, Check):
        identity = [of.rule, of.name, of.metric, of.subject, of.scheme]
        text, line, known = sentence(of), of.line, of.known
    key = digest(identity)
    places = [{"name": printable(of.subject), "kind": "object"}] if of.subject else []
    places += [{"name": printable(of.scheme), "kind": "member"}] if of.scheme else []
    place = {
        "artifactLocation": {"uri": policy_uri(gate.policy)},
        "region": {"startLine": max(1, line)},
    }
    row: dict[str, Any] = {
        "ruleId": of.rule,
        "kind": "fail",
        "level": "warning",
        "message": {"text": _unlinked(text)},
        "locations": [{"physicalLocation": place, "logicalLocations": places}],
        # The second is the name that code scanning looks for.
        "partialFingerprints": {"qauditCheck/v1": key, "primaryLocationLineHash": f"{key[:16]}:1"},
        "suppressions": [],
    }
    if gate.baseline is not None:
        row["baselineState"] = "unchanged" if known else "new"
    if not isinstance(of, Check):
        return row
    levels = {"error": "error", "warn": "warning"}
    failed, interval, ignored = of.outcome == "fail", of.interval, of.ignored
    row |= {"kind": "fail" if failed else "open"}
    row |= {"level": levels.get(of.level, "note") if failed else "none"}
    if ignored is not None:
        why = _unlinked(f"{ignored.reason} (until {ignored.until.isoformat()})")
        row["suppressions"] = [{"kind": "external", "status": "accepted", "justification": why}]
    row["properties"] = {
        "outcome": of.outcome,
        **{name: getattr(interval, name, None) for name in ("estimate", "low", "high")},
        "margin": of.margin,
        "unit": of.unit,
        "documents": of.documents,
    }
    return row


def policy_uri(policy: Policy) -> str:
    """Return the path of the policy, relative to the repository if it was given so."""
    if policy.path is None:
        return quote(f"qaudit/policy/presets/{policy.name}.yaml")
    path = PurePath(policy.path)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())


def _unlinked(text: str) -> str:
    """Return text in which no name makes a link, which SARIF's plain text knows."""
    return printable(text).replace("](", "] (")


# ------------------------------------------------------------------------------- GitHub

Kind = Literal["error", "warning", "notice"]
MOST_OF_A_KIND = 10


def _github(gate: Answer) -> str:
    """Annotate: a breach is an error; what is ignored a notice; all else a warning."""
    if isinstance(gate, QauditError):
        text = with_hint(gate.message, gate.hint)
        return _command("error", text, f"{TITLE}: {NO_ANSWER}") + "\n"
    path = gate.policy.path
    file = None if path is None else PurePath(path).as_posix()
    kinds: dict[str, Kind] = {"fail": "error", "ignored": "notice"}
    lines: dict[Kind, list[str]] = {"error": [], "warning": [], "notice": []}
    lines["notice"].append(_command("notice", f"{headline(gate)} Checks: {counted(gate)}", TITLE))
    for check in troubles(gate):
        kind = kinds.get(standing(check), "warning")
        title = f"{check.rule} {where(check)}"
        lines[kind].append(_command(kind, sentence(check), title, file, check.line))
    for w in gate.warnings:
        title = f"{w.rule} {gate.policy.name}"
        lines["warning"].append(_command("warning", with_hint(w.message, w.hint), title, file))
    for kind, some in lines.items():
        if (more := len(some) - MOST_OF_A_KIND + 1) > 1:
            more_in = f"and {more} more: see the step's summary"
            some[MOST_OF_A_KIND - 1 :] = [_command(kind, more_in, TITLE)]
    return "\n".join(line for some in lines.values() for line in some) + "\n"


def _command(kind: Kind, text: str, title: str, file: str | None = None, line: int = 1) -> str:
    """Write a workflow command; no name ends it or begins another."""

    def data(text: str) -> str:
        return printable(text).replace("%", "%25")  # line ends are gone with the controls

    properties = {} if file is None else {"file": file, "line": str(max(1, line))}
    pairs = (properties | {"title": title}).items()
    shown = (f"{k}={data(v).replace(':', '%3A').replace(',', '%2C')}" for k, v in pairs)
    return f"::{kind} {','.join(shown)}::{data(text)}"


# ------------------------------------------------------------------------------- badges

LABEL = "quantization"
COLORS = {  # each dark enough for white text: a contrast of 4.5 and more
    "pass": "#2e7d32",
    "fail": "#b3261e",
    "inconclusive": "#8a5a00",
    "incomplete": "#8a5a00",
    "error": "#5f6368",
}
FONT = "Verdana,Geneva,DejaVu Sans,sans-serif"
_HEIGHT, _PADDING = 20, 6


def _shields(gate: Answer) -> str:
    """Write the badge as JSON that shields.io fetches and draws."""
    text, color = _badge(gate)
    more = {"isError": True} if isinstance(gate, QauditError) else {}
    return text_of({"schemaVersion": 1, "label": LABEL, "message": text, "color": color, **more})


def _badge(gate: Answer) -> tuple[str, str]:
    """Return the status of each bit class, the most bits first, what was ignored, and a colour."""
    if isinstance(gate, QauditError):
        return NO_ANSWER, COLORS["error"]
    of_policy = [decision for decision in gate.classes if decision.level != "off"]
    parts = []
    for decision in of_policy:
        name = decision.bit_class
        name = f"{name}-bit" if name.isdecimal() else printable(name)
        parts.append(f"{name} {decision.status}")
    status = verdict_of(gate, "loss").status
    if status not in [decision.status for decision in of_policy if decision.level == "error"]:
        parts.append(f"overall {status}" if parts else status)  # by a check of no class
    if ignored := sum(standing(check) == "ignored" for check in worst_first(gate)):
        parts.append(f"{ignored} ignored")
    return " | ".join(parts), COLORS[gate.verdict]


def _drawn(gate: Answer) -> str:
    text, color = _badge(gate)
    left, right = (round(pixels_of(part, 11)) + 2 * _PADDING for part in (LABEL, text))
    size = {"width": left + right, "height": _HEIGHT}
    letters = (
        element("text", words(part), x=start + _PADDING, y=14, textLength=width - 2 * _PADDING)
        for part, start, width in ((LABEL, 0, left), (text, left, right))
    )
    svg = element(
        "svg",
        element("title", words(f"{LABEL}: {text}")),
        element("clipPath", element("rect", **size, rx=3), id="r"),
        element(
            "g",
            element("rect", width=left, height=_HEIGHT, fill="#444"),
            element("rect", x=left, width=right, height=_HEIGHT, fill=color),
            clip_path="url(#r)",
        ),
        element("g", *letters, fill="#fff", font_family=FONT, font_size=11),
        xmlns="http://www.w3.org/2000/svg",
        **size,
        role="img",
        aria_label=f"{LABEL}: {text}",
    )
    return f"{svg}\n"


FORMATS: dict[str, Callable[[Answer], str]] = {
    "terminal": lambda answer: terminal.render(document(answer)),
    "md": lambda answer: within(answer, COMMENT_NBYTES),
    "json": _json,
    "junit": _junit,
    "sarif": _sarif,
    "github": _github,
    "badge": _drawn,
    "shields": _shields,
}
"""What each format makes of a gate, and of a failure of the tool."""
