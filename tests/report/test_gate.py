"""The gate in every format: held to the schema of whoever reads it, and safe with hostile names."""

import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
import xmlschema
from hypothesis import given
from hypothesis import strategies as st

from qaudit.errors import AuditError
from qaudit.report.gate import FORMATS, MOST_RESULTS, policy_uri, render, step_summary
from qaudit.report.gate.checks import COMMENT_NBYTES, within
from qaudit.saved.audits import path_of
from qaudit.types import Gate, Interval
from tests.support import gate_sample as sample

SCHEMAS = Path(__file__).parent / "schemas"
OURS = jsonschema.Draft202012Validator(json.loads(path_of("gate").read_text(encoding="utf-8")))
SARIF = jsonschema.Draft4Validator(json.loads((SCHEMAS / "sarif-2.1.0-rtm.5.json").read_text()))
JUNIT = xmlschema.XMLSchema(str(SCHEMAS / "junit-10.xsd"))
GATES = {
    "every": sample.gate,
    "hostile": sample.hostile,
    "crowd": lambda: sample.crowd(30),
    "empty": lambda: Gate(sample.POLICY, ()),
    "not finite": lambda: sample.gate(
        sample.check(interval=Interval(float("inf"), float("-inf"), float("inf")))
    ),
}
ERROR = AuditError("`a%b` is not\nwhole JSON", hint="run `qaudit scan` again")


@pytest.fixture(params=GATES, ids=str)
def gate(request):
    return GATES[request.param]()


def rows(gate):
    return json.loads(render(gate, "sarif"))["runs"][0]["results"]


def controls(text):
    return [c for c in text if not c.isprintable() and c != "\n"]


@pytest.mark.parametrize("form", FORMATS)
def test_no_name_brings_a_command_and_no_failure_is_a_finding(form):
    text = render(sample.hostile(), form) + step_summary(sample.hostile())
    assert controls(text) == []
    for name in ("::error::owned", "x " * 30 + "::stop-commands::y"):
        owned = sample.gate(sample.check(subject=name, scheme=name, message=name, hint=name))
        text = render(owned, form) + step_summary(owned)
        assert form == "github" or not re.search(r"^\s*::", text, re.M)
    said = render(ERROR, form)
    assert "not judged" in said.lower() or "whole JSON" in said
    assert "fail" not in said.replace("failures=", "")
    assert controls(said) == []
    off = sample.gate(sample.check(level="off", subject="nobody"), sample.PASSES)
    assert "nobody" not in render(off, form)


VALID = {
    "json": lambda text: OURS.validate(json.loads(text)),
    "junit": JUNIT.validate,
    "sarif": lambda text: SARIF.validate(json.loads(text)),
    "github": lambda text: parsed(text),
    "badge": ElementTree.fromstring,
}


@pytest.mark.parametrize("form", VALID)
def test_every_gate_and_failure_keeps_the_schema_of_whoever_reads_it(gate, form):
    VALID[form](render(gate, form))
    VALID[form](render(ERROR, form))
    lines = render(gate, "terminal").splitlines()
    assert [line for line in lines if len(line) > 80] == []


def test_what_is_for_people_fits_and_says_what_it_left_out():
    text, summary = render(sample.crowd(3000), "md"), step_summary(sample.crowd(6000))
    assert len(text.encode()) <= COMMENT_NBYTES
    assert len(summary.encode()) <= 1024 * 1024
    assert summary.startswith("## qaudit gate\n\n**HOLD by the policy `house`.**")
    assert "Checks: 6000 breaches." in summary
    for long in (text, summary):
        assert re.search(r"and [\d,]+ checks more", long)
    for nbytes in (900, 1200, 2000):  # sections are left out as a whole, from the end
        text = within(sample.gate(), nbytes)
        assert len(text.encode()) <= nbytes
        assert "Left out for length, see `qaudit gate --format json`: Checks that passed" in text
        assert "<details>" not in text
        assert text.count("| outcome |") <= 1


def test_every_rule_of_a_result_is_described(gate):
    (run,) = json.loads(render(gate, "sarif"))["runs"]
    rules = run["tool"]["driver"]["rules"]
    for row in run["results"]:
        assert rules[row["ruleIndex"]]["id"] == row["ruleId"]
        assert "](" not in row["message"]["text"]  # no name makes a link
    assert all(re.fullmatch(r"QA\d{3}", rule["id"]) and rule["help"]["text"] for rule in rules)


@given(st.floats(-1, 1), st.floats(0, 1), st.integers(0, 10_000), st.integers(1, 500))
def test_no_number_is_in_a_print(estimate, width, documents, line):
    interval, said = Interval(estimate, estimate - width, estimate + width), f"by {estimate}"
    moved = sample.check(interval=interval, documents=documents, line=line, message=said)
    (before,), (after,) = rows(sample.gate(sample.FAILS)), rows(sample.gate(moved))
    assert before["partialFingerprints"] == after["partialFingerprints"]
    assert "baselineState" not in rows(sample.gate(moved, baseline=None))[0]
    for change in ({"subject": "b"}, {"scheme": "x"}, {"name": "n"}, {"rule": "QA020"}):
        (other,) = rows(sample.gate(sample.check(**change)))
        assert other["partialFingerprints"] != before["partialFingerprints"]


COMMAND = re.compile(r"::(error|warning|notice) ((?:[a-z]+=[^,:\n]*,?)+)::([^\n]*)")


def parsed(text):
    """Read workflow commands as the runner does: split first, then undo the escapes."""

    def undo(value):
        for escape, letter in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n")):
            value = value.replace(escape, letter)
        return value.replace("%25", "%")

    found = []
    for line in text.splitlines():
        match = COMMAND.fullmatch(line)
        assert match, line
        pairs = (pair.split("=", 1) for pair in match[2].split(","))
        found.append((match[1], {k: undo(v) for k, v in pairs}, undo(match[3])))
    return found


def test_at_most_ten_annotations_are_of_a_kind():
    for breaches, shown, more in ((10, 10, 0), (11, 9, 2), (40, 9, 31)):
        errors = [c for c in parsed(render(sample.crowd(breaches), "github")) if c[0] == "error"]
        assert sum(c[1]["title"].startswith("QA001") for c in errors) == shown
        assert len(errors) <= 10
        assert more == 0 or errors[-1][2].startswith(f"and {more} more")
        assert f"step{breaches - 1} " in errors[0][1]["title"] + " "


def test_a_badge_is_svg_that_says_everything_in_its_title(gate):
    svg = ElementTree.fromstring(render(gate, "badge"))
    space = "{http://www.w3.org/2000/svg}"
    label, said = (text.text or "" for text in svg.iter(f"{space}text"))
    assert svg.get("aria-label") == svg.findtext(f"{space}title") == f"{label}: {said}"
    assert "http" not in re.sub(r'xmlns="[^"]*"|<t.*', "", render(sample.gate(), "badge"))


def test_what_is_too_much_for_a_reader_is_left_out(monkeypatch):
    assert MOST_RESULTS == 5000  # more are refused where it is uploaded
    monkeypatch.setattr("qaudit.report.gate.MOST_RESULTS", 20)
    (run,) = json.loads(render(sample.crowd(23), "sarif"))["runs"]
    assert len(run["results"]) == 20
    (said,) = run["invocations"][0]["toolExecutionNotifications"]
    assert said["message"]["text"] == "3 results more are left out"
    twice = sample.gate(sample.FAILS, sample.FAILS, sample.FAILS)
    suite = ElementTree.fromstring(render(twice, "junit").encode())[0]
    assert len({case.get("name") for case in suite.iter("testcase")}) == 3
    preset = replace(sample.POLICY, path=None, name="release")
    assert policy_uri(preset) == "qaudit/policy/presets/release.yaml"
    assert resources.files("qaudit").joinpath("policy/presets/release.yaml").is_file()
    assert policy_uri(replace(preset, path="/etc/a b.yaml")) == "file:///etc/a%20b.yaml"
