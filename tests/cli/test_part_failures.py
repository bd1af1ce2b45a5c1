"""Whatever ends a part: a sentence, an exit code, and a state that the next run fixes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from qaudit.executors import measuring as measuring_module
from tests.support.cli import Run, audit_of, refused
from tests.support.parts import MAIN, demo, same_audit, start

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture
def planned(tmp_path: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert qaudit("plan", *demo(tmp_path), "--out", "out").code == 0
    return tmp_path / "out"


def status(qaudit: Run, out: Path) -> dict[str, object]:
    return json.loads(qaudit("status", out, "--json").out)


def whole(qaudit: Run, out: Path) -> None:
    """Assert that the next runs end in the audit of one process."""
    for _ in range(3):
        assert qaudit("part", out, "--part", "0/1").code == 0
        if qaudit("collect", out).code == 0:
            break
    assert qaudit("scan", *demo(out.parent), "--out", "whole").code == 0
    same_audit(out.parent / "whole", out)


@pytest.mark.slow
def test_memory_that_runs_out_twice_costs_one_subject_and_a_larger_node_fixes_it(
    planned: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = measuring_module.measure

    def scarce(task, *arguments):
        if task.subject.label == "step200":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return measure(task, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(measuring_module, "measure", scarce)
        for _ in range(2):
            done = qaudit("part", planned, "--part", "0/1")
            refused(
                done,
                4,
                "out of memory while measuring `step200`",
                "`--set stream_memory=SIZE`",
            )
        done = qaudit("part", planned, "--part", "0/1")
        assert (done.code, "1 failed" in done.err) == (3, True)
    assert status(qaudit, planned)["failed"] == ["step200"]
    assert qaudit("collect", planned).code == 3
    (skipped,) = [row for row in audit_of(planned)["skipped"] if row["subject"] == "step200"]
    assert "2 processes ended while they measured it" in skipped["reason"]
    whole(qaudit, planned)


@pytest.mark.slow
def test_a_subject_that_fails_does_not_end_the_others_and_is_tried_again(
    planned: Path, qaudit: Run
) -> None:
    config = planned.parent / "series" / "step200" / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"num_attention_heads"', '"heads"'))
    done = qaudit("part", planned, "--part", "0/1")
    assert done.code == 3, done.err
    standing = status(qaudit, planned)
    assert standing["failed"] == ["step200", "mean(step10+step200)"]  # it is a member
    assert standing["missing"] == []
    config.write_text(text)
    whole(qaudit, planned)


@pytest.mark.slow
def test_a_part_killed_twice_at_one_subject_gives_it_up(planned: Path, qaudit: Run) -> None:
    killed = (  # as the kernel does where memory runs out: a shell reports 137
        "import os, signal, qaudit.executors.measuring as measuring\n"
        "measuring.measure = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for _ in range(2):
        process = start(planned.parent, "part", planned, "--part", "0/1", main=killed + MAIN)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert len(list((planned / "parts" / "units").glob("*.attempts"))) == 1
    standing = status(qaudit, planned)
    assert [part["state"] for part in standing["parts"]] == ["lost"]
    done = qaudit("part", planned, "--part", "0/1")
    assert (done.code, "1 failed" in done.err) == (3, True), done.err
    assert len(status(qaudit, planned)["failed"]) == 1
    whole(qaudit, planned)


@pytest.mark.slow
def test_a_part_stopped_again_and_again_is_never_given_up(
    planned: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler stops it, at the end of its time or for another job."""
    for stop in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        with monkeypatch.context() as patched:
            patched.setattr(measuring_module, "measure", lambda *_: signal.raise_signal(stop))  # noqa: B023
            done = qaudit("part", planned, "--part", "0/1")
        refused(done, 75, f"was stopped by {stop.name}; what was measured is kept", "")
    assert not list((planned / "parts" / "units").glob("*.attempts"))
    log = (planned / "parts" / "0-of-1.jsonl").read_text()
    assert log.count('"ended": "KeyboardInterrupt"') == 3
    assert qaudit("part", planned, "--part", "0/1").code == 0


def test_a_part_stopped_while_it_is_imported_says_so(planned: Path) -> None:
    stopped_at_import = (
        "import os, signal, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Stop())\n"
    )
    process = start(planned.parent, "part", planned, "--part", "0/1", main=stopped_at_import + MAIN)
    _, err = process.communicate()
    assert (process.returncode, "was stopped by SIGTERM" in err) == (75, True), err


@pytest.mark.slow
def test_a_node_that_is_gone_leaves_parts_that_any_other_measures(
    planned: Path, qaudit: Run
) -> None:
    """What a node leaves: a log without an end, an attempt, a half-written file."""
    assert qaudit("part", planned, "--part", "0/2").code == 0
    units = planned / "parts" / "units"
    record = next(units.glob("*.json"))
    gone = json.dumps({"at": 0.0, "began": True, "host": "n9", "pid": 1, "job": None})
    (planned / "parts" / "1-of-2.jsonl").write_text(f'{gone}\n{{"at": 0.0, "subject": "step')
    record.with_suffix(".attempts").write_text("n9 0\n")
    (planned / "evidence" / "x.n9-0123456789abcdef.partial").write_bytes(b"half")
    states = {part["part"]: part["state"] for part in status(qaudit, planned)["parts"]}
    assert states == {"0/2": "done", "1/2": "silent"}
    whole(qaudit, planned)


@pytest.mark.slow
def test_a_part_on_another_kind_of_device_is_refused(
    tmp_path: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert qaudit("plan", *demo(tmp_path), "--out", "out").code == 0
    for kind, code in (("A100", 0), ("H200", 78), ("A100", 0)):
        monkeypatch.setattr("qaudit.executors.part.device_name", lambda _, kind=kind: kind)
        done = qaudit("part", "out", "--part", "0/2" if kind == "A100" else "1/2")
        assert done.code == code
        if code:
            refused(done, 78, "this device is `H200`", "use `A100` for all parts")
