"""`qaudit import`: answers of other tools become tasks of an audit, judged as its own are."""

import shutil
from pathlib import Path

import pytest

from qaudit.audit import load
from tests.support.cards import whole_at
from tests.support.cli import OUT, TEXT, audit_of, edited, refused
from tests.support.parts import same_audit

ANSWERS = Path(__file__).parents[1] / "items" / "answers" / "lm-eval"
STRICT = "exact_match,strict"
FILES = ("--base", "answers/base", "--quantized", "rtn-4bit=answers/q3", "--metric", STRICT)
SCHEMES = "rtn-4bit,rtn-3bit:group=16"
SCAN = ("scan", "series/step10", *TEXT, "--schemes", SCHEMES, "--out", "out")


@pytest.fixture(scope="module")
def scanned(after):
    """Return a folder with a finished scan of one checkpoint."""
    return after(SCAN)


@pytest.fixture
def place(scanned, tmp_path, monkeypatch):
    folder = shutil.copytree(scanned, tmp_path / "place")
    monkeypatch.chdir(folder)
    shutil.copytree(ANSWERS, folder / "answers")
    return folder


@pytest.fixture
def imported(place, qaudit):
    return qaudit("import", "out", *FILES)


def tasks():
    return {(row["scheme"], row["task"]): row for row in audit_of()["tasks"]}


def test_imported_answers_are_rows_like_those_of_a_scan_and_gated_so(imported, place, qaudit):
    assert imported.code == 0, imported.err
    rows = tasks()
    row = rows["rtn-4bit", "choice"]
    assert (row["right_to_wrong"], row["wrong_to_right"], row["items"]) == (5, 1, 15)
    assert row["p_value"] == pytest.approx(0.125)
    assert row["drop_low"] < row["drop"] < row["drop_high"]
    assert row["imported"] == "lm-eval 0.4.13, acc,none, greedy"
    assert rows["rtn-4bit", "arguments"]["flips"] == pytest.approx(2 / 14)
    assert ("rtn-4bit", "mean") in rows
    assert "`choice` (lm-eval 0.4.13, acc,none, greedy)" in whole_at(OUT)
    assert "1 back, p 0.12" in imported.out
    # A gate reads them by their evidence and refuses what was edited.
    rule = '{name: answers, metric: flips, margin: "5%", tasks: worst}'
    (place / "policy.yaml").write_text(f"rules:\n  - {rule}\n", "utf-8")
    assert "flips" in qaudit("gate", "out", "--policy", "policy.yaml", code=1).out
    whole, choice = (OUT / "audit.json").read_text("utf-8"), tasks()["rtn-4bit", "choice"]
    for name, value in (("imported", ""), ("right_to_wrong", 0)):
        rows = [{**row, name: value} if row == choice else row for row in audit_of()["tasks"]]
        edited(OUT / "audit.json", tasks=rows)
        refused(qaudit("gate", "out"), 2, f"`{name}` of choice of", "edited after it was written")
        (OUT / "audit.json").write_text(whole, "utf-8")
    path = OUT / choice["evidence"]
    assert path.parent.parent.name == "imported"
    with path.open("ab") as file:
        file.write(b"x")
    refused(qaudit("gate", "out"), 4, "is not the evidence", "again")


def test_a_scan_keeps_what_was_imported_until_weights_are_others(imported, place, qaudit):
    shutil.copytree(OUT, place / "before")
    before, files = tasks(), sorted(Path("out/evidence/imported").rglob("*.npz"))
    assert qaudit(*SCAN).code == 0
    same_audit(place / "before", OUT)
    assert tasks() == before

    swapped = ("--base", "answers/q3", "--quantized", "rtn-4bit=answers/base")
    assert qaudit("import", "out", *swapped, "--metric", STRICT).code == 0
    assert tasks()["rtn-4bit", "choice"]["wrong_to_right"] == 5
    assert len(sorted(Path("out/evidence/imported").rglob("*.npz"))) == len(files)
    assert qaudit("import", "out", *FILES).code == 0
    assert tasks() == before

    shutil.copytree(place / "series" / "step200", place / "series" / "step10", dirs_exist_ok=True)
    assert qaudit(*SCAN).code == 0
    assert tasks() == {}


def test_several_schemes_are_compared_with_one_base(place, qaudit):
    both = ("--quantized", "rtn-4bit=answers/base", "--quantized", "rtn-3bit:group=16=answers/q3")
    qaudit("import", "out", "--base", "answers/base", *both, "--metric", STRICT, code=0)
    rows = tasks()
    assert rows["rtn-4bit", "choice"]["right_to_wrong"] == 0
    assert rows["rtn-3bit:group=16", "choice"]["right_to_wrong"] == 5
    path = next((place / "answers" / "q3").glob("samples_choice_*"))
    path.write_text(path.read_text("utf-8").replace('"acc"', '"other"'), "utf-8")
    done = qaudit("import", "out", "--base", "answers/base", *both, "--metric", STRICT)
    refused(done, 2, "are marked by other metrics under rtn-3bit:group=16", "--metric NAME")
    # What cannot be imported is refused in words.
    load("out").save("copy")
    base, q3 = "--base answers/base", "--quantized rtn-4bit=answers/q3"
    for words, sentence, hint in (
        (f"nothing {base} {q3}", "no audit", "output folder"),
        (f"out {base} --quantized rtn-2bit=answers/q3", "of `step10` under `rtn-2b", "`rtn-4bit`"),
        (f"out {base} --quantized answers", "is not SCHEME=PATH", "a scheme of the audit"),
        (f"out {base} {q3}", "marked by", f"--metric {STRICT}"),
        (f"out --base answers/none {q3}", "there is no `answers/none`", "--log_samples"),
        (f"out {base} {q3} --subject step20", "no subject `step20`", "step10"),
        (f"copy {base} {q3}", "a copy of an audit", "output folder"),
    ):
        refused(qaudit("import", *words.split()), 2, sentence, hint)
