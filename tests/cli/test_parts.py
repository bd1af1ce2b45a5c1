"""A plan measured in parts: the same audit as one machine's, whatever is killed on the way."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import TEXT, Outcome, Run, audit_of, refused, run_in
from tests.support.models import write_documents
from tests.support.parts import MAIN, ROOT, WITHOUT_TORCH, losses, same_audit, start, until

ASKED = (
    "series", *TEXT, "--schemes", "gptq-3bit:group=16,rtn-3bit:group=16", "--soup",
    "step10+step200", "--set", "calibration_documents=2", "--set", "context=32",
)  # fmt: skip


@pytest.fixture
def planned(place: Path, qaudit: Run) -> Path:
    """Return a folder with a plan for parts, whose calibration text has eight documents."""
    write_documents(place / "calibration.jsonl", range(100, 108))
    assert qaudit("plan", *ASKED, "--out", "out").code == 0
    return place / "out"


@pytest.fixture(scope="module")
def part(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a plan of which one part measured the first round."""
    folder = tmp_path_factory.mktemp("part") / "place"
    shutil.copytree(shipped, folder)
    write_documents(folder / "calibration.jsonl", range(100, 108))
    assert run_in(folder, "plan", *ASKED, "--out", "out") == 0
    assert run_in(folder, "part", "out", "--part", "0/1") == 0
    return folder / "out"


@pytest.fixture
def once(part: Path, place: Path) -> Path:
    write_documents(place / "calibration.jsonl", range(100, 108))
    return shutil.copytree(part, place / "out")


@pytest.fixture
def whole(place: Path, planned: Path, qaudit: Run) -> Path:
    """Return the same audit, measured by one process."""
    assert qaudit("scan", *ASKED, "--out", "whole").code == 0
    return place / "whole"


def parts(qaudit: Run, out: Path, count: int) -> list[Outcome]:
    return [qaudit("part", out, "--part", f"{k}/{count}") for k in range(count)]


def measured(qaudit: Run, out: Path, count: int = 2) -> Path:
    """Run rounds until nothing is due."""
    for _ in range(4):
        assert {one.code for one in parts(qaudit, out, count)} <= {0}
        if qaudit("collect", out).code == 0:
            return out
    raise AssertionError("rounds do not end")


def test_parts_give_the_audit_of_one_process(whole: Path, planned: Path, qaudit: Run) -> None:
    due = qaudit("collect", planned)
    refused(due, 3, "round 1 has 4 subjects, and 4 are not measured yet", "qaudit part")
    assert {one.code for one in parts(qaudit, planned, 2)} == {0}
    same_audit(whole, measured(qaudit, planned))


@pytest.mark.slow
def test_a_part_that_is_killed_is_run_again(
    whole: Path, place: Path, planned: Path, qaudit: Run
) -> None:
    process = start(place, "part", planned, "--part", "0/1")
    evidence = planned / "evidence"
    until(lambda: evidence.is_dir() and any(evidence.glob("*.npz")))
    process.kill()
    process.communicate()
    assert qaudit("status", planned).code == 3
    same_audit(whole, measured(qaudit, planned, 3))  # cut otherwise


@pytest.mark.slow
def test_copies_of_a_folder_are_merged_by_content(
    whole: Path, place: Path, planned: Path, qaudit: Run
) -> None:
    shutil.copytree(planned, place / "far")
    assert qaudit("part", planned, "--part", "0/2").code == 0
    assert qaudit("part", place / "far", "--part", "1/2").code == 0
    assert qaudit("collect", planned, place / "far").code == 0
    same_audit(whole, planned)


def test_a_copy_that_another_plan_measured_is_refused(
    place: Path, planned: Path, qaudit: Run
) -> None:
    assert qaudit("plan", *ASKED, "--out", "other", "--set", "context=16").code == 0
    done = qaudit("collect", planned, "other")
    refused(done, 2, "was measured by another plan", "copy the folder of the plan")


@pytest.mark.parametrize(
    ("patched", "value", "sentence", "hint"),
    [
        ("planning.pin._installed", {"torch": "9.9"}, "torch 9.9 instead of", "environment of the"),
        ("executors.part.wrong_products", 7, "7 of 1048576 products in float32", "another device"),
        ("", 0, "the text is not that of the plan", "the same files"),
    ],
)
def test_what_is_not_fit_for_a_plan_is_refused_before_weights(
    planned: Path, place: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch,
    patched: str, value: object, sentence: str, hint: str,
) -> None:  # fmt: skip
    if patched:
        monkeypatch.setattr(f"qaudit.{patched}", lambda *_: value)
    else:
        write_documents(place / "evaluation.jsonl", range(300, 312))
    refused(qaudit("part", planned, "--part", "0/1"), 78, sentence, hint)
    assert not (planned / "evidence").exists()


def test_a_subject_that_ends_its_process_twice_is_given_up(once: Path, qaudit: Run) -> None:
    (record,) = (once / "parts" / "units").glob("step10-*.json")
    record.unlink()
    record.with_suffix(".attempts").write_text("n1 1\nn2 2\n")  # as two kills leave it
    assert qaudit("part", once, "--part", "0/1").code == 3
    assert json.loads(qaudit("status", once, "--json").out)["failed"] == ["step10"]
    assert qaudit("collect", once).code == 3
    assert qaudit("part", once, "--part", "0/1").code == 0
    assert json.loads(qaudit("status", once, "--json").out)["failed"] == []


def test_a_search_is_a_round_behind_its_candidates(place: Path, qaudit: Run) -> None:
    asked = ("series", *TEXT, "--schemes", "rtn-3bit:group=16", "--soup")
    asked = (*asked, "greedy(step10+step200+step1000)", "--set", "context=32")
    assert qaudit("plan", *asked, "--out", "out").code == 0
    assert qaudit("part", "out", "--part", "0/1").code == 0
    refused(qaudit("collect", "out"), 3, "round 2 has 1 subject, and", "qaudit part")
    assert qaudit("part", "out", "--part", "0/1").code == 0
    assert qaudit("collect", "out").code == 0
    assert qaudit("scan", *asked, "--out", "whole").code == 0
    same_audit(place / "whole", place / "out")


@pytest.mark.slow
def test_candidates_that_are_no_subjects_are_a_round_of_their_own(place: Path, qaudit: Run) -> None:
    asked = ("series", *TEXT, "--schemes", "rtn-3bit:group=16", "--checkpoints", "step10")
    asked = (*asked, "--set", "diagnostics=weights", "--soup", "greedy(step10+step200+step1000)")
    assert qaudit("plan", *asked, "--out", "out").code == 0
    for due in ("round 1 has 1 subject", "round 2 has 2 subjects", "round 3 has 1 subject"):
        refused(qaudit("collect", "out"), 3, f"{due}, and", "qaudit part")
        assert {one.code for one in parts(qaudit, place / "out", 2)} == {0}
    assert qaudit("collect", "out").code == 0
    assert qaudit("scan", *asked, "--out", "whole").code == 0
    same_audit(place / "whole", place / "out")
    first, second = (audit_of(place / name)["diagnostics"] for name in ("whole", "out"))
    assert [first[name] for name in ("greedy", "weights")] == [
        second[name] for name in ("greedy", "weights")
    ]


@pytest.mark.slow
def test_diagnostics_of_parts_are_those_of_one_process(place: Path, qaudit: Run) -> None:
    asked = (*ASKED, "--set", "diagnostics=weights", "--set", "repeats=1")
    assert qaudit("plan", *asked, "--out", "out").code == 0
    assert {one.code for one in parts(qaudit, place / "out", 3)} == {0}
    assert qaudit("collect", "out").code == 0
    assert qaudit("scan", *asked, "--out", "whole").code == 0
    first, second = (json.loads((place / n / "audit.json").read_text()) for n in ("out", "whole"))
    assert first["diagnostics"]["weights"] == second["diagnostics"]["weights"]


@pytest.mark.slow
def test_a_login_node_without_torch_collects(place: Path, planned: Path, qaudit: Run) -> None:
    assert qaudit("part", planned, "--part", "0/1").code == 0
    process = start(place, "collect", planned, main=WITHOUT_TORCH + MAIN)
    _, err = process.communicate()
    assert process.returncode == 0, err


def test_a_scan_afterwards_measures_nothing(once: Path, qaudit: Run) -> None:
    measured(qaudit, once, 1)
    before = losses(once)
    files = sorted(path.name for path in (once / "evidence").glob("*.npz"))
    assert qaudit("scan", *ASKED, "--out", once).code == 0
    assert losses(once) == before
    assert sorted(path.name for path in (once / "evidence").glob("*.npz")) == files


@pytest.mark.parametrize(
    ("text", "sentence"), [("x", "is no part"), ("1/0", "is no part"), ("3/2", "no part 3 of 2")]
)
def test_a_part_that_is_none(planned: Path, qaudit: Run, text: str, sentence: str) -> None:
    assert sentence in qaudit("part", planned, "--part", text).err


@pytest.mark.parametrize("name", ["SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX"])
def test_a_scheduler_gives_the_number(
    planned: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    done = qaudit("part", planned, "--part", "2")
    assert done.code == 0
    assert "part 1/2" in done.err


def test_a_folder_without_a_plan(place: Path, qaudit: Run) -> None:
    for command in (
        ["part", "series", "--part", "0/1"],
        ["collect", "series"],
        ["status", "series"],
    ):
        refused(qaudit(*command), 2, "has no plan", "qaudit plan TARGET --out")


@pytest.mark.slow
def test_a_whole_node_runs_the_parts_of_its_gpus_by_the_script_of_the_docs(
    place: Path, planned: Path, qaudit: Run
) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    (script,) = [s for s in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "for gpu in" in s]
    command = shlex.join([sys.executable, "-c", MAIN])
    function = f'qaudit() {{ {command} "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-c", function + script],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SLURM_ARRAY_TASK_ID": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("measured now, 0 failed") == 4  # there are four subjects
    assert qaudit("collect", planned).code == 0
