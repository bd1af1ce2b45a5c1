"""Small files that decide numbers are those of the plan, or their subject is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli import TEXT, Run, audit_of, refused
from tests.support.quantized import quantized_copy

SCHEME = ("--schemes", "rtn-4bit:group=32", "--set", "context=32")
STEP10, STEP200 = Path("series/step10"), Path("series/step200")


def edited(path: Path, **values: object) -> str:
    """Change keys of a JSON file, and return what it held."""
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text) | values))
    return text


@pytest.fixture
def planned(place: Path, qaudit: Run) -> Path:
    targets = ("series", "--checkpoints", "step10", "--checkpoints", "step200")
    assert qaudit("plan", *targets, *TEXT, *SCHEME, "--out", "out").code == 0
    return place / "out"


def eos(folder: Path) -> None:
    edited(folder / "tokenizer_config.json", eos_token="a")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: edited(f / "config.json", rms_norm_eps=0.5), "`config.json` of `step200` has"),
        (eos, "`tokenizer_config.json` of `step200` has changed"),
        (lambda f: (f / "added_tokens.json").write_text("{}"), "`added_tokens.json` of `step200`"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
            "`model.safetensors.index.json` of `step200` was added",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), "`tokenizer.json` of `step200` was removed"),
    ],
    ids=["configuration", "tokenizer", "another file of it", "index", "no tokenizer"],
)
def test_a_part_refuses_a_small_file_that_is_not_the_plans(
    planned: Path, qaudit: Run, change: Callable[[Path], object], sentence: str
) -> None:
    change(STEP200)
    assert qaudit("part", planned, "--part", "0/1").code == 3
    assert qaudit("collect", planned).code == 3
    audit = audit_of(planned)
    (skipped,) = audit["skipped"]
    assert skipped["subject"] == "step200"
    assert sentence in skipped["reason"]
    assert {row["subject"] for row in audit["measurements"]} == {"step10"}


def test_planning_again_measures_the_edited_configuration(
    planned: Path, place: Path, qaudit: Run
) -> None:
    before = edited(STEP200 / "config.json", rms_norm_eps=0.5)
    assert qaudit("part", planned, "--part", "0/1").code == 3
    targets = ("series", "--checkpoints", "step10", "--checkpoints", "step200")
    assert qaudit("plan", *targets, *TEXT, *SCHEME, "--out", "out").code == 0
    assert qaudit("part", planned, "--part", "0/1").code == 0
    (STEP200 / "config.json").write_text(before)
    assert qaudit("plan", *targets, *TEXT, *SCHEME, "--out", "out").code == 0
    assert qaudit("part", planned, "--part", "0/1").code == 0
    assert qaudit("collect", planned).code == 0
    losses = {row["subject"]: row["ce"] for row in audit_of(planned)["measurements"]}
    assert abs(losses["step10"] - losses["step200"]) < 1


def test_an_export_refuses_a_configuration_that_is_not_the_audits(place: Path, qaudit: Run) -> None:
    assert qaudit("scan", STEP10, *TEXT, *SCHEME, "--out", "out").code == 0
    edited(STEP10 / "config.json", rms_norm_eps=0.5)
    done = qaudit("export", "out", "--subject", "step10", "--scheme", SCHEME[1], "--out", "new")
    refused(done, 4, "`config.json` of `step10` has changed", "plan again")
    assert not (place / "new").exists()


def test_a_file_that_ships_keeps_its_quantization_configuration(place: Path, qaudit: Run) -> None:
    quantized_copy(STEP10, place / "model-GPTQ", "gptq")
    what = (STEP10, "--shipped", "model-GPTQ", *TEXT, *SCHEME)
    assert qaudit("plan", *what, "--out", "out").code == 0
    (place / "model-GPTQ" / "quantize_config.json").write_text("{}")
    done = qaudit("part", "out", "--part", "0/1")
    refused(done, 4, "`quantize_config.json` of `model-GPTQ` was added", "plan again")


def test_weights_of_a_file_that_ships_are_those_of_the_plan(place: Path, qaudit: Run) -> None:
    quantized_copy(STEP10, place / "model-GPTQ", "gptq")
    what = (STEP10, "--shipped", "model-GPTQ", *TEXT, *SCHEME)
    assert qaudit("plan", *what, "--out", "out").code == 0
    weights = place / "model-GPTQ" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert qaudit("part", "out", "--part", "0/1").code == 3
    qaudit("collect", "out")
    (unit,) = (place / "out" / "parts" / "units").glob("*.json")
    assert "the weights of `model-GPTQ` have changed" in unit.read_text()


def test_plan_and_evidence_hold_the_hashes_of_small_files(place: Path, scan: Run) -> None:
    assert scan("series", "--soup", "late=last:2").code == 0
    audit = audit_of(place / "out")
    for checkpoint in audit["plan"]["checkpoints"]:
        names = {file["name"] for file in checkpoint["settings"]}
        assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    late = next(one for one in audit["subjects"] if one["label"] == "late")
    assert late["configuration"] == late["members"][0]["label"]
