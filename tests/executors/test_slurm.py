"""Job arrays on a real Slurm: preemption, requeue, kill -9, resubmission, the same audit."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from qaudit.executors.slurm import _ranges
from tests.support.cli import Run
from tests.support.parts import demo, same_audit, start, until
from tests.support.slurm import Slurm, missing_programs

MISSING = missing_programs()
slurm_only = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:  # a short path, for sockets
        Path(folder).chmod(0o755)
        with Slurm(Path(folder)) as running:
            yield running


def pids(log: Path) -> list[int]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [one["pid"] for one in map(json.loads, lines) if one.get("began")]


def measuring(log: Path) -> bool:
    return log.exists() and '"subject"' in log.read_text().splitlines()[-1]


class TestOnSlurm:
    pytestmark = slurm_only

    def test_preempted_and_killed_parts_give_the_audit_of_one_process(
        self, slurm: Slurm, tmp_path: Path, qaudit: Run
    ) -> None:
        asked = ("scan", *demo(tmp_path), "--out", "out", "--executor", "slurm")
        asked = (*asked, "--parts", 5, "--slurm", "--mem=100 --cpus-per-task=1")
        variables = {"SLURM_CONF": slurm.env["SLURM_CONF"]}
        submitted = start(tmp_path, *asked, "--detach", **variables)
        _, err = submitted.communicate(timeout=120)
        assert submitted.returncode == 0, err
        assert "submitted parts 0-3 of 4 as job" in err
        parts = tmp_path / "out" / "parts"
        until(lambda: any(measuring(log) for log in parts.glob("*.jsonl")), 120)
        victim = next(log for log in sorted(parts.glob("*.jsonl")) if measuring(log))
        slurm.run("sbatch", "-p", "urgent", "--mem=100", f"--chdir={tmp_path}", "-N", "2",
                  "--exclusive", "--wrap", "sleep 2")  # fmt: skip
        until(lambda: len(pids(victim)) > 1, 120)  # preempted, and requeued
        until(lambda: measuring(victim), 120)
        os.kill(pids(victim)[-1], signal.SIGKILL)
        followed = start(tmp_path, *asked, **variables)
        _, err = followed.communicate(timeout=280)
        rounds = 0
        while followed.returncode == 3 and rounds < 3:  # each run submits what is missing
            rounds += 1
            followed = start(tmp_path, *asked, **variables)
            _, err = followed.communicate(timeout=280)
        assert followed.returncode == 0, err
        whole = start(tmp_path, "scan", *demo(tmp_path), "--out", "whole")
        whole.communicate(timeout=120)
        same_audit(tmp_path / "whole", tmp_path / "out")
        again = start(tmp_path, *asked, **variables)
        _, err = again.communicate(timeout=120)
        assert again.returncode == 0
        assert "submitted" not in err


def test_ranges_are_those_of_slurm() -> None:
    assert _ranges([0]) == "0"
    assert _ranges([5, 3, 4, 0, 9]) == "0,3-5,9"


def test_a_machine_without_slurm_says_so(
    tmp_path: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = qaudit("scan", *demo(tmp_path), "--out", "out", "--executor", "slurm")
    assert done.code == 4
    assert "there is no `sbatch` here" in done.err
    assert "sbatch --array=" in (tmp_path / "out" / "parts" / "job.sbatch").read_text()
