"""`--set diagnostics=NAME`: from the option to the plan, the audit, the card and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import qaudit.diagnostics.weights_measure as weights_part
from qaudit.diagnostics.case import Measure
from qaudit.diagnostics.diagnostic import diagnostics
from qaudit.errors import ModelError
from qaudit.saved.audits import read_audit
from tests.support.cards import whole_at
from tests.support.cli import Run, audit_of, refused

ONE = ("series/step1000", "--set", "diagnostics=weights")
PARTS = "sensitivity:layers=1:scheme=rtn-3bit"


def test_a_scan_diagnoses_what_it_measured_before_and_says_so(scan: Run, place: Path) -> None:
    assert scan("series/step1000").code == 0
    done = scan(*ONE, "--set", f"diagnostics={PARTS}")
    assert done.code == 0
    assert "diagnose sensitivity at rtn-3bit: about 17 streams more for each" in _lines(done.err)
    found = audit_of(place / "out")
    assert {row["part"] for row in found["diagnostics"]["weights"]} == {"model", "role"}
    assert [row["part"] for row in found["diagnostics"]["sensitivity"]][-1] == "all"
    card = whole_at(place / "out")
    assert "<summary>Why</summary>" in card
    assert f"--set diagnostics=weights,{PARTS}" in card


def test_what_ships_is_not_diagnosed_again_where_it_is_rounded_otherwise(
    scan: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qaudit.planning.price.ARITHMETIC", 1)  # of a long scan it is 10 %
    done = scan("series/step10", "--schemes", "gptq-4bit", "--set", f"diagnostics={PARTS}")
    assert done.code == 0, done.err
    assert audit_of(place / "out")["plan"]["otherwise"] is not None
    assert audit_of(place / "out")["diagnostics"]["sensitivity"][-1]["part"] == "all"


def test_positions_are_listed_where_they_are_requested_and_need_no_weights(
    scan: Run, place: Path
) -> None:
    assert scan("series/step1000").code == 0
    assert "positions" not in audit_of(place / "out")["diagnostics"]
    assert scan("series/step1000", "--set", "diagnostics=positions").code == 0
    found = audit_of(place / "out")
    cells = {(row["subject"], row["scheme"]) for row in found["diagnostics"]["positions"]}
    assert cells == {(row["subject"], row["scheme"]) for row in found["measurements"]}


def _lines(text: str) -> str:
    return " ".join(text.split())


def test_a_diagnostic_that_cannot_be_had_leaves_the_audit_whole_and_incomplete(
    scan: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(case: Any) -> Any:
        raise ModelError("it is tied in knots")

    monkeypatch.setattr(weights_part, "MEASURE", Measure(fails))
    done = scan(*ONE)
    assert done.code == 3
    assert "step1000 went without weights: it is tied in knots" in done.err
    assert read_audit(place / "out").skipped == ()


@pytest.mark.parametrize(
    ("asked", "sentence", "hint"),
    [
        ("weight", "there is no diagnostic `weight`", "did you mean `weights`?"),
        ("weights:group=big", "`group=big` of `weights` is not a whole number", "whole number"),
        ("sensitivity:scheme=bnb-nf4", "has no bits to choose", "sensitivity:scheme=gptq-3bit"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    scan: Run, asked: str, sentence: str, hint: str
) -> None:
    refused(scan("series/step10", "--dry-run", "--set", f"diagnostics={asked}"), 2, sentence, hint)


def test_sensitivity_needs_a_scheme_with_bits(place: Path, qaudit: Run) -> None:
    done = qaudit("scan", "series/step10", "--schemes", "bnb-nf4", "--dry-run",
                  "--calibration", "calibration.jsonl", "--evaluation", "evaluation.jsonl",
                  "--set", "diagnostics=sensitivity")  # fmt: skip
    refused(done, 2, "no scheme of this audit has bits to choose", "scheme=gptq-3bit")


def test_a_recipe_and_the_environment_can_ask_for_diagnostics(
    scan: Run, place: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = "targets: [series/step10]\ndiagnostics: [weights]\nschemes: [rtn-4bit]\n"
    recipe += "calibration: calibration.jsonl\nevaluation: evaluation.jsonl\n"
    (place / "mine.yaml").write_text(recipe, encoding="utf-8")
    done = qaudit("scan", "mine.yaml", "--dry-run", "--json")
    assert json.loads(done.out)["recipe"]["diagnostics"] == ["weights"]
    monkeypatch.setenv("QAUDIT_DIAGNOSTICS", "weights:group=64,sensitivity")
    done = scan("series/step10", "--dry-run", "--json")
    assert json.loads(done.out)["recipe"]["diagnostics"] == ["weights:group=64", "sensitivity"]


def test_a_diagnosis_is_part_of_the_price(scan: Run) -> None:
    plain = json.loads(scan("series", "--dry-run", "--json").out)
    asked = json.loads(
        scan("series", "--dry-run", "--json", "--set", "diagnostics=sensitivity").out
    )
    assert asked["streams"] == plain["streams"] + 3 * 18
    assert plain["diagnoses"] == []


def test_diagnostics_are_listed_with_what_they_are(qaudit: Run) -> None:
    lines = dict(line.split(maxsplit=1) for line in qaudit("list", "diagnostics").out.splitlines())
    assert set(lines) == set(diagnostics())
    assert lines["weights"].startswith("Kurtosis, outliers, ranges")
