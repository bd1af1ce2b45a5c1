"""A scan as its user sees it: what is printed where, what is written, and what it exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.cli import QUICK, STEPS, TEXT, Run, audit_of
from tests.support.models import write_documents

LABELS = [f"step{step}" for step in STEPS]


def labels(audit: dict) -> list[str]:
    return [subject["label"] for subject in audit["subjects"]]


@pytest.mark.usefixtures("pictures")
def test_a_scan_measures_everything_and_exits_with_zero(place: Path, scan: Run) -> None:
    done = scan("series")
    audit = audit_of(place / "out")
    measured = [(row["subject"], row["scheme"]) for row in audit["measurements"]]
    assert measured == [(label, scheme) for label in LABELS for scheme in ("fp", "rtn-4bit")]
    assert audit["skipped"] == []
    assert "series: 3 checkpoints, 1 scheme, 12 documents (276 tokens)" in done.out
    assert all(label in done.err for label in LABELS)
    assert "3 checkpoints, 1 scheme and full precision" in done.err
    written = {path.relative_to(place / "out").parts[0] for path in (place / "out").rglob("*")}
    assert written - {".qaudit.lock"} == {
        "audit.json", "card.md", "report.html", "evidence", "plots", "plan.json", "parts",
    }  # fmt: skip
    assert {path.suffix for path in (place / "out" / "plots").iterdir()} == {".png", ".svg"}
    assert done.code == 0


def test_json_alone_goes_to_stdout_when_asked_for(place: Path, scan: Run) -> None:
    done = scan("series", "--checkpoints", "step*0?", "--json")
    assert json.loads(done.out) == audit_of(place / "out")
    assert done.out == (place / "out" / "audit.json").read_text(encoding="utf-8")
    assert labels(json.loads(done.out)) == ["step200", "step1000"]  # as the glob chooses
    assert "plan " in done.err
    assert done.code == 0


def test_folders_are_one_series_in_order_and_a_quiet_scan_says_nothing_on_stderr(
    place: Path, scan: Run
) -> None:
    done = scan("series/step1000", "series/step10", "-q")
    assert labels(audit_of(place / "out")) == ["step10", "step1000"]
    assert (done.code, done.err, "step1000" in done.out) == (0, "", True)


def test_choices_become_accuracy_of_every_subject_and_scheme(place: Path, scan: Run) -> None:
    items = [
        {"question": f"which {k}", "choices": ["fox", "dog", "night"], "answer": k % 3}
        for k in range(6)
    ]
    lines = "\n".join(json.dumps(item) for item in items)
    (place / "choices.jsonl").write_text(lines, encoding="utf-8")
    assert scan("series/step10", "series/step200", "--set", "choices=choices.jsonl").code == 0
    audit = audit_of(place / "out")
    rows = {(row["subject"], row["scheme"]): row for row in audit["tasks"]}
    pairs = [(label, scheme) for label in LABELS[:2] for scheme in ("fp", "rtn-4bit")]
    assert list(rows) == pairs
    assert all(
        row["accuracy"] * 6 == pytest.approx(round(row["accuracy"] * 6)) for row in audit["tasks"]
    )
    assert rows["step10", "fp"]["accuracy_drop"] is None
    assert rows["step10", "rtn-4bit"]["accuracy_drop"] is not None
    assert audit["plan"]["protocol"]["choices"] == 6


def test_one_target_and_two_do_not_share_a_folder(place: Path, qaudit: Run) -> None:
    for targets in (["series/step10"], ["series/step10", "series/step200"]):
        assert qaudit("scan", *targets, *TEXT, "--schemes", "rtn-4bit").code == 0
    written = sorted(path.name for path in (place / "qaudit-out").iterdir())
    assert written == ["step10", "step10+step200"]


def test_options_come_from_the_environment_too(
    place: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "CALIBRATION": "calibration.jsonl",
        "EVALUATION": "evaluation.jsonl",
        "SCHEMES": "rtn-4bit,rtn-3bit",
        "CHECKPOINTS": "step10",
        "CONTEXT": "16",
        "BOS": "never",
        "PACKED": "1",
        "OUT": "elsewhere",
        "JSON": "1",
        "QUIET": "1",
    }.items():
        monkeypatch.setenv(f"QAUDIT_{name}", value)
    done = qaudit("scan", "series", "--schemes", "rtn-8bit")
    audit = json.loads(done.out)
    assert [row["scheme"] for row in audit["measurements"]] == ["fp", "rtn-8bit"]  # options win
    assert labels(audit) == ["step10"]
    protocol = audit["plan"]["protocol"]
    assert (protocol["context"], protocol["bos"], protocol["packed"]) == (16, "never", True)
    assert audit_of(place / "elsewhere") == audit
    assert done.err == ""


def test_a_recipe_says_what_options_say_and_options_win(place: Path, qaudit: Run) -> None:
    (place / "audit.yaml").write_text(
        "targets: [series]\nschemes: [rtn-4bit, rtn-3bit]\ncheckpoints: step10\n"
        "calibration: calibration.jsonl\nevaluation: evaluation.jsonl\ncontext: 32\n",
        encoding="utf-8",
    )
    done = qaudit("scan", "audit.yaml", "--schemes", "rtn-8bit", "--json", "-q")
    audit = json.loads(done.out)
    assert [row["scheme"] for row in audit["measurements"]] == ["fp", "rtn-8bit"]
    assert audit["plan"]["context"] == 32
    assert (place / "qaudit-out" / "audit" / "card.md").is_file()


def test_a_checkpoint_without_a_tokenizer_reads_with_that_of_the_others(
    place: Path, scan: Run
) -> None:
    for file in (place / "series" / "step10").glob("token*"):
        file.unlink()
    done = scan("series")
    assert labels(audit_of(place / "out")) == LABELS
    assert done.code == 0


def test_pickled_weights_are_read_when_they_are_trusted(place: Path, scan: Run) -> None:
    folder = place / "series" / "step200"
    assert scan("series/step200").code == 0
    before = audit_of(place / "out")["measurements"]
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert scan("series/step200", "--allow-pickle", "--out", "again").code == 0
    after = audit_of(place / "again")["measurements"]
    assert [row["ce"] for row in after] == [row["ce"] for row in before]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dry_run_prints_the_plan_and_writes_nothing(
    place: Path, scan: Run, as_json: bool
) -> None:
    done = scan("series", "--dry-run", *(["--json"] if as_json else []))
    if as_json:
        plan = json.loads(done.out)
        assert [subject["label"] for subject in plan["subjects"]] == LABELS
    else:
        assert "3 checkpoints" in done.out
    assert not (place / "out").exists()
    assert (done.code, done.err) == (0, "")


def test_a_scan_of_few_documents_says_what_is_missing(place: Path, qaudit: Run) -> None:
    write_documents(place / "two.jsonl", range(300, 302))
    done = qaudit(
        "scan", "series/step10", *QUICK[:2], "--evaluation", "two.jsonl", "--schemes", "rtn-4bit"
    )
    assert "evaluate on at least" in done.out
    assert done.code == 0


def test_every_scheme_has_its_divergence_also_where_full_precision_was_measured_before(
    place: Path, scan: Run
) -> None:
    assert scan("series/step10").code == 0
    assert scan("series/step10", "--schemes", "rtn-2bit").code == 0  # beside rtn-4bit
    full, four, two = audit_of(place / "out")["measurements"]
    assert (full["scheme"], four["scheme"], two["scheme"]) == ("fp", "rtn-4bit", "rtn-2bit")
    assert full["kl"] is None
    assert 0 < four["kl_low"] <= four["kl"] <= four["kl_high"]
    assert four["kl"] < two["kl"] <= two["kl_max"]
    assert two["kl_p50"] <= two["kl_p90"] <= two["kl_p99"] <= two["kl_max"] * 1.1
    assert 0 < two["top1_agreement"] <= 1
    assert 0 < two["rms_dp"] < 1
