"""A pool of processes on one machine: the same audit, whatever is killed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from qaudit.executors import queues
from qaudit.executors.queues import gpu_workers
from tests.support.cli import Run, audit_of, refused
from tests.support.parts import demo, same_audit

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.mark.slow
def test_two_workers_give_the_audit_of_one_process(
    tmp_path: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    killed = []
    start = queues.Pool._start

    def first_is_killed(self, worker, part, count):  # type: ignore[no-untyped-def]
        process = start(self, worker, part, count)
        if not killed:
            killed.append(part)
            process.kill()
        return process

    monkeypatch.setattr("qaudit.executors.queues.Pool._start", first_is_killed)
    monkeypatch.setattr("qaudit.executors.queues.PARTS_PER_WORKER", 1)
    done = qaudit("scan", *demo(tmp_path), "--out", "out", "--set", "executor=local")
    assert done.code == 0, done.err
    assert f"part {killed[0]}/2 on worker 0 ended with -9" in done.err
    assert qaudit("scan", *demo(tmp_path), "--out", "whole").code == 0
    same_audit(tmp_path / "whole", tmp_path / "out")


@pytest.mark.slow
def test_a_worker_that_is_killed_among_candidates_of_a_search_is_replaced_by_the_same_command(
    tmp_path: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = (*demo(tmp_path), "--checkpoints", "step10", "--set", "repeats=1")
    asked = (*asked, "--soup", "best=greedy(step10+step200+step1000)")
    started: list[tuple[str, int]] = []
    start = queues.Pool._start

    def first_of_round_2_is_killed(self, worker, part, count):  # type: ignore[no-untyped-def]
        process = start(self, worker, part, count)
        in_round_2 = (tmp_path / "out/parts/round-2.json").exists()
        if in_round_2 and not started:
            process.kill()
        if in_round_2:
            started.append((worker.name, part))
        return process

    monkeypatch.setattr("qaudit.executors.queues.Pool._start", first_of_round_2_is_killed)
    monkeypatch.setattr("qaudit.executors.queues.TRIES", 1)
    monkeypatch.setattr("qaudit.executors.queues.PARTS_PER_WORKER", 1)
    done = qaudit("scan", *asked, "--out", "out", "--set", "executor=local")
    assert done.code == 3, done.err
    assert "round 2 has 2 subjects, and 1 is not measured yet" in done.err
    assert started == [("worker 0", 0), ("worker 1", 1)]  # a candidate for each of two workers
    done = qaudit("scan", *asked, "--out", "out", "--set", "executor=local")
    assert done.code == 0, done.err
    assert qaudit("scan", *asked, "--out", "whole").code == 0
    same_audit(tmp_path / "whole", tmp_path / "out")
    first, second = (audit_of(tmp_path / name)["diagnostics"] for name in ("whole", "out"))
    assert first["greedy"] == second["greedy"]
    assert len(first["greedy"][0]["candidates"]) == 3


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("3,5", ["3", "5"]),
        ("0,0,1", ["0", "1"]),
        (" 2, 1", ["2", "1"]),
        ("1,-1,0", ["1"]),
        ("GPU-7f,", ["GPU-7f"]),
    ],
)
def test_gpus_are_counted_once_and_as_cuda_sees_them(
    monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [w["CUDA_VISIBLE_DEVICES"] for w in gpu_workers("all").values()] == names
    assert [w["CUDA_VISIBLE_DEVICES"] for w in gpu_workers("1").values()] == names[:1]
    with pytest.raises(Exception, match=f"more GPUs than the {len(names)} that are visible"):
        gpu_workers(str(len(names) + 1))


def test_gpus_are_those_that_the_driver_lists_and_no_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "GPU 0: H100 (UUID: GPU-1)\n  MIG 3g.40gb Device 0: (UUID: MIG-2)\nGPU 1: H100\n"
    answers = iter([subprocess.CompletedProcess((), 0, text)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: next(answers, None) or absent())

    def absent() -> None:
        raise FileNotFoundError

    assert [*gpu_workers("all")] == ["GPU 0", "GPU 1"]
    with pytest.raises(Exception, match="more GPUs than the 0 that are visible"):
        gpu_workers("all")


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("text", ["0", "-1", "", "x", "1.5", "ALL", "9" * 5000, "\u0663"])
def test_gpus_that_are_no_number_are_refused_before_anything_is_planned(
    tmp_path: Path, qaudit: Run, text: str, dry: bool
) -> None:
    more = ["--dry-run"] if dry else []
    done = qaudit("scan", tmp_path / "absent", "--out", tmp_path / "out", f"--gpus={text}", *more)
    refused(done, 2, "is no number of GPUs", "or `all`")


def test_gpus_of_another_executor_or_device_are_refused(
    tmp_path: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = qaudit("scan", "demo", "--gpus", 1, "--set", "executor=slurm")
    refused(done, 2, "`--gpus` is of the executor `local`", "leave one of them out")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    done = qaudit("scan", *demo(tmp_path), "--out", tmp_path / "out", "--gpus", 1)
    refused(done, 2, "the plan computes on `cpu`", "--device cuda")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["--set", "stream_memory=250B"]),
        (["--set", "stream_memory=7B"], ["--set", "stream_memory=7B"]),
    ],
)
def test_workers_share_the_memory_for_hidden_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], expected: list[str]
) -> None:
    monkeypatch.setattr("qaudit.executors.queues.default_stream_limit", lambda: 1000)
    run: Any = None
    pool = queues.Pool(run, tmp_path, workers=queues.cpu_workers(4), options=options)
    assert [*pool.options] == expected
