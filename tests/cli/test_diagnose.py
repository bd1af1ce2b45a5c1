"""`--set diagnostics=NAME`: from the option to the plan, the audit, the card and the exit code."""

import json
from pathlib import Path
from unittest.mock import Mock

import qaudit.diagnostics.weights_measure as weights_part
from qaudit.diagnostics.case import Measure
from qaudit.diagnostics.diagnostic import diagnostics
from qaudit.errors import ModelError
from qaudit.saved.audits import read_audit
from tests.support.cards import whole_at
from tests.support.cli import OUT, audit_of, cells

ONE = ("series/step1000", "--set", "diagnostics=weights")
PARTS = "sensitivity:layers=1:scheme=rtn-3bit"


def test_a_scan_diagnoses_what_it_measured_before_and_says_so(scan):
    assert scan("series/step1000").code == 0
    assert "positions" not in audit_of()["diagnostics"]
    done = scan(*ONE, "--set", f"diagnostics={PARTS}", "--set", "diagnostics=positions", code=0)
    asked = "diagnose sensitivity at rtn-3bit: about 17 streams more for each"
    assert asked in " ".join(done.err.split())
    found = audit_of()["diagnostics"]
    assert {row["part"] for row in found["weights"]} == {"model", "role"}
    assert [row["part"] for row in found["sensitivity"]][-1] == "all"
    assert {(row["subject"], row["scheme"]) for row in found["positions"]} == cells().keys()
    card = whole_at(OUT)
    assert "<summary>Why</summary>" in card
    assert f"--set diagnostics=weights,{PARTS}" in card


def test_a_diagnostic_that_cannot_be_had_leaves_the_audit_whole_and_incomplete(scan, monkeypatch):
    fails = Mock(side_effect=ModelError("it is tied in knots"))
    monkeypatch.setattr(weights_part, "MEASURE", Measure(fails))
    assert "step1000 went without weights: it is tied in knots" in scan(*ONE, code=3).err
    assert read_audit(OUT).skipped == ()
    # What ships is not diagnosed again where it is rounded otherwise.
    monkeypatch.setattr("qaudit.planning.price.ARITHMETIC", 1)  # of a long scan it is 10 %
    more = ("--schemes", "gptq-4bit", "--set", f"diagnostics={PARTS}", "--out", "other")
    scan("series/step10", *more, code=0)
    other = audit_of(Path("other"))
    assert other["plan"]["otherwise"] is not None
    assert other["diagnostics"]["sensitivity"][-1]["part"] == "all"


def test_diagnoses_are_part_of_a_recipe_of_the_environment_and_of_the_price(
    scan, place, qaudit, monkeypatch
):
    recipe = "targets: [series/step10]\ndiagnostics: [weights]\nschemes: [rtn-4bit]\n"
    recipe += "calibration: calibration.jsonl\nevaluation: evaluation.jsonl\n"
    (place / "mine.yaml").write_text(recipe, encoding="utf-8")
    done = qaudit("scan", "mine.yaml", "--dry-run", "--json")
    assert json.loads(done.out)["recipe"]["diagnostics"] == ["weights"]
    plain = json.loads(scan("series", "--dry-run", "--json").out)
    monkeypatch.setenv("QAUDIT_DIAGNOSTICS", "weights:group=64,sensitivity")
    asked = json.loads(scan("series", "--dry-run", "--json").out)
    assert asked["recipe"]["diagnostics"] == ["weights:group=64", "sensitivity"]
    assert (asked["streams"], plain["diagnoses"]) == (plain["streams"] + 3 * 18, [])
    # They are listed with what they are.
    lines = dict(line.split(maxsplit=1) for line in qaudit("list", "diagnostics").out.splitlines())
    assert set(lines) == set(diagnostics())
    assert lines["weights"].startswith("Kurtosis, outliers, ranges")
