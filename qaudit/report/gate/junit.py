"""The gate as JUnit XML, for Jenkins, GitLab and other viewers of test reports.

Each check is a test case. Only a breach is a failure: a check that is missing, inconclusive or only
a warning is skipped, with the reason, since calling it failed would claim a finding that the audit
does not have. The job is red all the same, by its exit code. An error is the tool's own: no audit,
a damaged one, no Hub.

Jenkins reads the attribute `message`, GitLab the text of the element; both are there. Names hold
no number that is measured, so that GitLab can pair a check with the one of the target branch.
"""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

from qaudit.errors import QauditError
from qaudit.report.format import printable
from qaudit.report.gate.standing import (
    counted,
    sentence,
    standing,
    where,
    with_hint,
    word,
    worst_first,
)
from qaudit.types import Check, Gate
from qaudit.version import __version__


def render(gate: Gate) -> str:
    cases = worst_first(gate)
    kinds = Counter(map(_kind, cases))
    suite = ElementTree.Element(
        "testsuite",
        name=f"qaudit gate: {printable(gate.policy.name)}",
        tests=str(len(cases)),
        failures=str(kinds["failure"]),
        errors="0",
        skipped=str(kinds["skipped"]),
    )
    if gate.policy.path:
        suite.set("file", printable(gate.policy.path))
    _properties(suite, gate)
    seen: Counter[str] = Counter()
    for check in cases:
        suite.append(_case(check, seen))
    if gate.warnings:
        warnings = (printable(with_hint(w.message, w.hint)) for w in gate.warnings)
        ElementTree.SubElement(suite, "system-err").text = "\n".join(warnings)
    return _document(suite, len(cases), kinds["failure"], 0)


def render_failure(error: QauditError) -> str:
    suite = ElementTree.Element(
        "testsuite", name="qaudit gate", tests="1", failures="0", errors="1", skipped="0"
    )
    case = ElementTree.SubElement(suite, "testcase", name="judge the audit", classname="qaudit")
    kind = type(error).__name__
    message = printable(error.message)
    reason = ElementTree.SubElement(case, "error", type=kind, message=message)
    reason.text = f"{message}\n{printable(error.hint)}".rstrip()
    return _document(suite, 1, 0, 1)


def _document(suite: ElementTree.Element, tests: int, failures: int, errors: int) -> str:
    top = ElementTree.Element(
        "testsuites", name="qaudit", tests=str(tests), failures=str(failures), errors=str(errors)
    )
    top.append(suite)
    ElementTree.indent(top)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(top, "unicode")}\n'


def _properties(suite: ElementTree.Element, gate: Gate) -> None:
    properties = ElementTree.SubElement(suite, "properties")
    values = {
        "verdict": gate.verdict,
        "exit_code": str(gate.exit_code),
        "checks": counted(gate),
        "baseline": gate.baseline or "",
        "targets": ", ".join(gate.targets),
        "qaudit": __version__,
    }
    for name, value in values.items():
        ElementTree.SubElement(properties, "property", name=name, value=printable(value))


def _kind(check: Check) -> str:
    stands = standing(check)
    return {"fail": "failure", "pass": "pass"}.get(stands, "skipped")


def _case(check: Check, seen: Counter[str]) -> ElementTree.Element:
    name = printable(f"{check.name}: {where(check)}")
    seen[f"{check.rule} {name}"] += 1
    if (times := seen[f"{check.rule} {name}"]) > 1:  # GitLab drops the second of a name
        name += f" ({times})"
    case = ElementTree.Element("testcase", name=name, classname=f"qaudit.{check.rule}")
    text = printable(sentence(check))
    kind = _kind(check)
    if kind == "pass":
        ElementTree.SubElement(case, "system-out").text = text
    else:
        text = text if kind == "failure" else f"{word(check)}: {text}"
        ElementTree.SubElement(case, kind, type=check.rule, message=text).text = text
    return case
