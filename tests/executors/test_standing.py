"""What `qaudit status` says of parts: done, running, queued, lost, silent; and the time left."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import pytest

from qaudit.executors import status
from qaudit.executors.folder import parts_of
from qaudit.executors.records import PartLog
from qaudit.executors.status import render, run_status
from qaudit.saved.parts import read_run, unit_path
from qaudit.types import SILENT, units_of
from tests.support.cli import Run
from tests.support.parts import demo

HERE = platform.node()


@pytest.fixture
def planned(tmp_path: Path, qaudit: Run) -> Path:
    assert qaudit("plan", *demo(tmp_path), "--out", tmp_path / "out").code == 0
    return tmp_path / "out"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_subject_that_is_stopped_was_not_attempted(
    tmp_path: Path, error: type[BaseException]
) -> None:
    attempts = tmp_path / "step10.attempts"
    path = tmp_path / "0-of-1.jsonl"
    with pytest.raises(error), PartLog(path, lambda _: attempts, SILENT) as part:
        part.subject(0, 1, "step10")
        raise error
    assert attempts.exists() == (error is MemoryError)


def log(out: Path, name: str, *lines: dict[str, object], ago: float = 1.0) -> None:
    text = "".join(json.dumps({"at": time.time() - ago, **line}) + "\n" for line in lines)
    (out / "parts" / f"{name}.jsonl").write_text(text)


def states(out: Path) -> dict[str, str]:
    return {part.name: part.state for part in run_status(out).parts}


def began(**values: object) -> dict[str, object]:
    return {"began": True, "host": HERE, "pid": os.getpid(), "job": None, **values}


def test_without_a_queue_logs_and_processes_tell(planned: Path) -> None:
    (planned / "parts" / "units").mkdir()
    log(planned, "0-of-5", began(), {"subject": "step10"}, {"ended": "done"})
    log(planned, "1-of-5", began(), {"subject": "step10"}, {"ended": "KeyboardInterrupt"})
    log(planned, "2-of-5", began(), {"subject": "step200"})
    log(planned, "3-of-5", began(pid=2**22 + 1), {"subject": "step200"})
    log(planned, "4-of-5", began(host="n7", pid=1), {"subject": "step200"}, ago=400)
    (planned / "parts" / "5-of-6.jsonl").write_text('{"at": 1, "began": tr')  # cut by a kill
    expected = {"0/5": "done", "1/5": "stopped", "2/5": "running", "3/5": "lost", "4/5": "silent"}
    assert states(planned) == expected
    text = render(run_status(planned))
    assert "round 1: 0 of 4 subjects measured, 0 failed, 4 missing" in text
    assert f"part 2/5      running  {HERE} step200" in text


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("printf '7 RUNNING\\n8 PENDING\\n9 FAILED\\n'", ["running", "queued", "lost", "lost"]),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", ["lost"] * 4),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", ["running"] * 4),
    ],
)
def test_the_queue_tells_where_it_answers(
    planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: list[str]
) -> None:
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\n{answer}\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for number, job in enumerate("789"):
        log(planned, f"{number}-of-4", began(host="n1", job=job), {"subject": "step10"})
    log(planned, "3-of-4", began(host="n1", job="10"), {"subject": "step10"})
    assert list(states(planned).values()) == expected
    assert "--jobs=7,8,9,10" in (tmp_path / "asked").read_text()


def test_the_time_left_is_that_of_the_longest_part_that_runs(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(planned)
    units = units_of(run.plan.passes)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(status, "cost_of", lambda unit: 10.0)
    record = unit_path(run, units[0], planned).name
    done = {"measured": "step10", "outcome": "measured", "seconds": 20.0, "record": record}
    log(planned, "0-of-1", began(), {"subject": "step10"}, done, {"subject": "step200"}, ago=5)
    one = run_status(planned)
    assert one.left_seconds == pytest.approx(4 * 20 - 5)  # nothing is on disk yet
    assert one.waiting == ()
    (planned / "parts" / "0-of-1.jsonl").unlink()
    parts = parts_of(run, units, 3)
    assert len(parts) == 3
    for number in (0, 1):
        log(planned, f"{number}-of-3", began(), done, {"subject": "step10"}, ago=5)
    one = run_status(planned)
    assert one.left_seconds == pytest.approx(20 * max(map(len, parts[:2])) - 5)
    assert one.waiting == tuple(unit.label for unit in parts[2])
    text = render(one)
    assert f"about {one.left_seconds:.0f} s left in the parts that run; " in text
    assert text.splitlines()[0].endswith("in no part that runs")


def test_no_time_is_made_up_before_anything_is_measured(planned: Path) -> None:
    log(planned, "0-of-1", began(), {"subject": "step10"})
    assert run_status(planned).left_seconds is None
    assert "left" not in render(run_status(planned))
