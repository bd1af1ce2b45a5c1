"""A scan that reads a release and all of its ingredients says what the release is."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import qaudit.executors.measuring
from qaudit.saved.audits import from_json
from tests.support.cli import Run, audit_of
from tests.support.models import save_model, save_tokenizer
from tests.support.schemas import violations

FAMILY = """
family: tiny
description: tiny
stages: [{name: end, pattern: 'step(?P<step>[0-9]+)'}]
named: [{name: main, stage: end}]
soups: [{label: main, target: main, of: [step10, step200, step1000]}]
"""


@pytest.fixture
def released(place: Path) -> Path:
    """Return a place whose series holds the mean of its checkpoints as `main`."""
    series = place / "series"
    parts = [load_file(p / "model.safetensors") for p in sorted(series.glob("step*"))]
    save_tokenizer(save_model(series / "main", 7))
    mean = {name: sum(part[name] for part in parts) / 3 for name in parts[0]}
    save_file(mean, series / "main" / "model.safetensors", metadata={"format": "pt"})
    (series / "qaudit-family.yaml").write_text(FAMILY)
    return place


def test_a_release_that_is_the_mean_of_its_ingredients_is_said_to_be(
    scan: Run, released: Path
) -> None:
    done = scan("series")
    assert done.code == 0, done.err
    said = " ".join(done.err.split())
    assert "main is compared with the soup of step10, step200 and step1000" in said
    audit = audit_of(released / "out")
    (finding,) = [f for f in audit["findings"] if f["rule"] == "QA019"]
    soup = "the mean of `step10`, `step200` and `step1000`"
    assert f"`main` equals {soup} to the rounding of sums in fp32" in finding["message"]
    assert finding["message"] in (released / "out" / "card.md").read_text()
    (row,) = audit["diagnostics"]["released"]
    assert (row["label"], row["released"]) == ("main rebuilt", "main")
    assert 0 < row["of_largest"] < 3
    assert [s["label"] for s in audit["subjects"]] == ["step10", "step200", "step1000", "main"]
    assert violations(audit) == []
    (release,) = from_json((released / "out" / "audit.json").read_text()).plan.releases
    assert release.first.label == "main"


def test_a_release_that_is_another_soup_is_warned_of(scan: Run, released: Path) -> None:
    path = released / "series" / "main" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] *= 1.25
    save_file(tensors, path, metadata={"format": "pt"})
    assert scan("series").code == 0
    (finding,) = [f for f in audit_of(released / "out")["findings"] if f["rule"] == "QA019"]
    assert (finding["level"], finding["outcome"]) == ("warn", "fail")
    assert "in `model.norm.weight`" in finding["message"]
    assert "and a tensor by up to 0.25 of its norm" in finding["message"]


def test_the_same_scan_again_does_not_read_the_weights_again(
    scan: Run, released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scan("series").code == 0
    before = audit_of(released / "out")["diagnostics"]["released"]
    monkeypatch.delattr(qaudit.executors.measuring, "compare_weights")
    assert scan("series").code == 0
    assert audit_of(released / "out")["diagnostics"]["released"] == before


def test_a_release_by_itself_is_compared_with_nothing(scan: Run, released: Path) -> None:
    assert scan("series", "--checkpoints", "main").code == 0
    audit = audit_of(released / "out")
    assert "QA019" not in {f["rule"] for f in audit["findings"]}
    assert audit["plan"]["releases"] == []


def test_an_ingredient_that_cannot_be_read_skips_the_comparison_by_name(
    scan: Run, released: Path
) -> None:
    weights = released / "series" / "step200" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert scan("series").code == 3
    audit = audit_of(released / "out")
    assert [s["subject"] for s in audit["skipped"]] == ["step200", "main rebuilt"]
    assert "QA019" not in {f["rule"] for f in audit["findings"]}
