"""Job arrays on a real Slurm: preemption, requeue, kill -9, resubmission, the same audit."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qaudit.errors import UsageError
from qaudit.executors.queues import _jobs, _quoted, _ranges
from tests.support.cli import Run
from tests.support.parts import ROOT, demo, same_audit, start, until
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
        with Slurm(Path(folder), cpus=3) as running:  # room for every part at once
            yield running


def test_a_damaged_list_has_no_jobs_and_a_script_quotes_paths(tmp_path: Path) -> None:
    for text in ("[]", "7", '{"round": 1, "parts": 2, "jobs": 3}', "{"):
        (tmp_path / "slurm.json").write_text(text)
        assert _jobs(tmp_path / "slurm.json", 1, 2) == []
    assert _ranges([0]) == "0"
    assert _ranges([5, 3, 4, 0, 9]) == "0,3-5,9"
    assert _quoted("/a/b-1.log") == "/a/b-1.log"
    assert _quoted('/my runs/"b"') == '"/my runs/\\"b\\""'
    with pytest.raises(UsageError, match="control character"):
        _quoted("/a\n#SBATCH --account=x")


def lines_of(log: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, log.read_text().splitlines())) if log.exists() else []


def of_each_start(log: Path, key: str) -> list[Any]:
    return [line[key] for line in lines_of(log) if line.get("began")]


def measuring(log: Path) -> bool:
    """Return whether the process that wrote last has begun a subject and not ended."""
    lines = lines_of(log)
    began = max((k for k, one in enumerate(lines) if one.get("began")), default=len(lines))
    return any(one.get("subject") for one in lines[began:]) and "ended" not in lines[-1]


HOLD = """
import sys

if "part" in sys.orig_argv:
    import time
    from pathlib import Path
    import numpy as np

    savez = np.savez_compressed

    def held(file, **arrays):
        while Path("hold").exists():
            time.sleep(0.05)
        savez(file, **arrays)

    np.savez_compressed = held
"""


class Job:
    """`qaudit scan --set executor=slurm` in one folder, as often as it is run.

    Parts write no evidence while there is a file `hold`, so that a test finds them measuring.
    """

    def __init__(self, slurm: Slurm, place: Path, *more: object) -> None:
        self.slurm, self.place, self.heard = slurm, place, ""
        (place / "site").mkdir()
        (place / "site" / "sitecustomize.py").write_text(HOLD)
        self.hold = place / "hold"
        self.asked = ("scan", *demo(place), "--out", "out", "--set", "executor=slurm", *more)
        self.asked = (*self.asked, "--set", "slurm=--mem=100 --cpus-per-task=1")
        self.parts = place / "out" / "parts"

    def run(self, *more: object) -> int:
        """Run it to its end; what it submits is heard."""
        code, err = self.command(*self.asked, *more)
        self.heard += err
        return code

    def run_until_complete(self) -> int:
        """Run it again while it exits with 3; return how often."""
        for runs in range(1, 5):
            code = self.run()
            if code == 0:
                return runs
            assert code == 3, self.heard
        raise AssertionError(self.heard)

    def command(self, *command: object) -> tuple[int, str]:
        path = f"{self.place / 'site'}:{ROOT}"
        conf = self.slurm.env["SLURM_CONF"]
        process = start(self.place, *command, SLURM_CONF=conf, PYTHONPATH=path)
        out, err = process.communicate(timeout=600)
        return process.returncode, out + err

    def submitted(self) -> list[str]:
        return re.findall(r"submitted parts (\S+ of \d+) as job", self.heard)

    def measuring(self) -> Path:
        """Wait until any part measures, and return its log."""
        until(lambda: any(measuring(log) for log in self.parts.glob("*.jsonl")))
        return next(log for log in sorted(self.parts.glob("*.jsonl")) if measuring(log))

    def must_be_as_in_one_process(self) -> None:
        found = [k for k, one in enumerate(self.asked) if one == "--soup"][1:]
        soups = [self.asked[k + more] for k in found for more in (0, 1)]
        code, err = self.command("scan", *demo(self.place), *soups, "--out", "whole")
        assert code == 0, err
        same_audit(self.place / "whole", self.place / "out")


class TestOnSlurm:
    pytestmark = slurm_only

    def test_preempted_and_killed_parts_give_the_audit_of_one_process(
        self, slurm: Slurm, tmp_path: Path
    ) -> None:
        job = Job(slurm, tmp_path, "--set", "parts=5", "--soup", "step200+step1000")
        job.hold.touch()
        assert job.run("--set", "detach=true") == 0, job.heard
        (first,) = job.submitted()
        assert re.fullmatch("0-[34] of 5", first)  # of five subjects two may be in one part
        victim = job.measuring()
        code, text = job.command("status", "out")
        assert (code, "running" in text) == (3, True), text
        slurm.run("sbatch", "-p", "urgent", "--mem=100", f"--chdir={tmp_path}", "-N", "2",
                  "--exclusive", "--wrap", "sleep 2")  # fmt: skip
        until(lambda: len(of_each_start(victim, "pid")) > 1)  # preempted, and requeued
        until(lambda: measuring(victim))
        os.kill(of_each_start(victim, "pid")[-1], signal.SIGKILL)
        job.hold.unlink()
        job.run_until_complete()
        number = victim.name.partition("-")[0]
        assert f"{number} of 5" in job.submitted()[1:]  # it alone, of the first round
        assert first not in job.submitted()[1:]
        job.must_be_as_in_one_process()
        job.heard = ""
        assert job.run() == 0
        assert job.submitted() == []

    def test_a_node_that_is_gone_is_replaced_by_another(self, slurm: Slurm, tmp_path: Path) -> None:
        job = Job(slurm, tmp_path, "--set", "parts=2")
        job.hold.touch()
        assert job.run("--set", "detach=true") == 0, job.heard
        assert job.submitted() == ["0-1 of 2"]
        victim = job.measuring()
        node = slurm.lose_node_of(of_each_start(victim, "job")[-1])
        try:
            until(lambda: len(of_each_start(victim, "pid")) > 1, 200)  # requeued, unanswered
            job.hold.unlink()
            job.run_until_complete()
        finally:
            slurm.return_node(node)
        job.must_be_as_in_one_process()

    def test_a_search_is_a_job_of_one_part(self, slurm: Slurm, tmp_path: Path) -> None:
        job = Job(slurm, tmp_path, "--set", "parts=2", "--soup", "greedy(step10+step200+step1000)")
        job.run_until_complete()
        assert job.submitted()[:2] == ["0-1 of 2", "0 of 1"]
        job.must_be_as_in_one_process()


def test_without_slurm_it_says_so(
    tmp_path: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = qaudit("scan", *demo(tmp_path), "--out", "out", "--set", "executor=slurm")
    assert done.code == 4
    assert "`sbatch` failed: " in done.err
    assert "sbatch --array=" in (tmp_path / "out" / "parts" / "job.sbatch").read_text()
