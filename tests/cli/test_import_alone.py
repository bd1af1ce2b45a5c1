"""`qaudit import --alone`: an audit of imported answers, which says what it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qaudit.audit import load
from tests.support.cli import Outcome, Run, audit_of, refused
from tests.support.schemas import violations

ANSWERS = Path(__file__).parents[1] / "items" / "answers" / "lm-eval"
STRICT = "exact_match,strict"
NAMED = ("--alone", "--subject", "org/model", "--metric", STRICT)
FILES = ("--base", ANSWERS / "base", "--quantized", f"rtn-4bit={ANSWERS / 'q3'}")
RULES = """\
rules:
  - {name: answers, metric: flips, margin: 5%, subjects: "@ships", tasks: worst}
  - {name: drops, metric: accuracy_drop, margin: 900%, subjects: "@all"}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def imported(place: Path, qaudit: Run) -> Outcome:
    more = ("--quantized", f"gptq-4bit={ANSWERS / 'base'}")
    return qaudit("import", "out", *NAMED, *FILES, *more)


def test_answers_alone_make_an_audit_without_losses(imported: Outcome, place: Path) -> None:
    assert imported.code == 0, imported.err
    audit = audit_of(place / "out")
    assert violations(audit) == []
    rows = {(row["scheme"], row["task"]): row for row in audit["tasks"]}
    choice = rows["rtn-4bit", "choice"]
    assert (choice["right_to_wrong"], choice["wrong_to_right"], choice["items"]) == (5, 1, 15)
    assert rows["gptq-4bit", "mean"]["flips"] == 0
    for row in audit["measurements"]:
        assert (row["documents"], row["ce"], row["perplexity"]) == (0, None, None)
    row = load("out").tidy()[0]
    assert (row["loss"], row["bits_per_weight"], row["choice_accuracy"]) == (None, None, 0.4)
    assert audit["pick"] is None
    assert audit["findings"] == []
    card = (place / "out" / "card.md").read_text("utf-8")
    assert "No text was measured: answers alone were imported." in card
    assert "INCOMPLETE by the policy `release`" in card
    assert "org/model at rtn-4bit, 13.3" in card
    for loss in ("Added loss", "inf", "nan", "0 documents", "not finite"):
        assert loss not in card
    assert "13.3" in (place / "out" / "report.html").read_text("utf-8")


@pytest.mark.usefixtures("imported")
def test_a_gate_judges_every_scheme_by_rules_about_tasks(place: Path, qaudit: Run) -> None:
    (place / "rules.yaml").write_text(RULES, "utf-8")
    gate = qaudit("gate", "out", "--policy", "rules.yaml", "--format", "json")
    assert gate.code == 1, gate.err
    checks = json.loads(gate.out)["checks"]
    assert {(c["scheme"], c["metric"]): c["outcome"] for c in checks} == {
        ("rtn-4bit", "flips"): "fail",
        ("gptq-4bit", "flips"): "inconclusive",
        ("rtn-4bit", "accuracy_drop"): "pass",
        ("gptq-4bit", "accuracy_drop"): "pass",
    }


@pytest.mark.usefixtures("imported")
def test_rules_about_losses_are_missing_in_words(qaudit: Run) -> None:
    gate = qaudit("gate", "out")
    assert gate.code == 3
    sentence = "no text was measured of org/model: its answers alone were imported"
    assert " ".join(gate.out.split()).count(sentence) == 1  # and not for each rule
    refused(qaudit("pick", "out"), 2, "there is no loss to choose by", "`qaudit gate`")
    refused(qaudit("diff", "out", "out"), 2, "no loss to compare", "scan the weights")
    assert "arguments, imported" in qaudit("report", "out", "--format", "terminal").out
    assert qaudit("export", "out", "--out", "folder").code == 2


@pytest.mark.usefixtures("imported")
def test_an_edited_row_is_refused(place: Path, qaudit: Run) -> None:
    audit = audit_of(place / "out")
    next(row for row in audit["tasks"] if row["right_to_wrong"] == 5)["right_to_wrong"] = 0
    (place / "out" / "audit.json").write_text(json.dumps(audit), "utf-8")
    refused(qaudit("gate", "out"), 2, "disagrees with its evidence", "edited after it was written")


def test_a_signed_audit_of_answers_alone_is_held_to_its_key(
    place: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QAUDIT_SIGNING_KEY", "k" * 40)
    done = qaudit("import", "out", *NAMED, *FILES, "--sign")
    assert done.code == 0, done.err
    assert qaudit("gate", "out", "--signed").code == 3
    monkeypatch.setenv("QAUDIT_SIGNING_KEY", "x" * 40)
    refused(qaudit("gate", "out", "--signed"), 2, "sign", "")


def test_what_cannot_begin_an_audit_is_refused_before_it_is_written(
    place: Path, qaudit: Run
) -> None:
    unnamed = qaudit("import", "out", "--alone", *FILES, "--metric", STRICT)
    refused(unnamed, 2, "`--alone` needs the name", "--subject org/name")
    wrong = (*FILES[:3], f"awq-4bits={ANSWERS / 'q3'}")
    unknown = qaudit("import", "out", *NAMED, *wrong)
    refused(unknown, 2, "there is no scheme `awq-4bits`", "awq-4bit")
    twice = (*FILES, "--quantized", f"rtn:bits=4={ANSWERS / 'q3'}")
    refused(qaudit("import", "out", *NAMED, *twice), 2, "is named twice", "one text")
    assert not (place / "out").exists()
    assert qaudit("import", "out", *NAMED, *FILES).code == 0
    refused(qaudit("import", "out", *NAMED, *FILES), 2, "`out` is not empty", "name a new folder")
