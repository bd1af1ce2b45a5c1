"""Parts as a Slurm job array: a visible script, submitted for what is missing, followed by squeue.

Slurm is the queue, and requeues what is preempted. Its accounting is not used, because many sites
have none: records on disk tell what is done, `squeue` what still runs, and everything else is
missing and submitted again by the next run.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from qaudit.errors import MachineError
from qaudit.executors.cut import parts_of
from qaudit.executors.events import Executor
from qaudit.executors.records import Due, state_of
from qaudit.executors.standing import show
from qaudit.saved.parts import FOLDER
from qaudit.types import SILENT, Run, Watch, WorkUnit
from qaudit.whole import write_whole

SCRIPT, JOBS = "job.sbatch", "slurm.json"
SECONDS_BETWEEN_LOOKS = 5.0

TEXT = """\
#!/bin/bash
# Written by `qaudit scan --executor slurm`. Submit parts yourself: sbatch --array=0,3-5 {script}
#SBATCH --job-name=qaudit
#SBATCH --chdir={here}
#SBATCH --output={log}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@60
{options}
# 75 says: stopped, run me again. Slurm does, five times.
srun --ntasks=1 {command} --part "$SLURM_ARRAY_TASK_ID/{count}"
code=$?
if [ $code -eq 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 5 ]; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
exit $code
"""


class Detached(Due):
    """Parts are submitted, and nothing waits for them."""

    code = 0


class Slurm(Executor):
    """The executor of a cluster."""

    def __init__(
        self,
        run: Run,
        out: Path,
        *,
        parts: int,
        sbatch: Sequence[str] = (),
        options: Sequence[str] = (),
        detach: bool = False,
        watch: Watch = SILENT,
    ) -> None:
        """Submit at most `parts` tasks; `sbatch` are its options, `options` those of the part."""
        super().__init__(run, out, watch)
        self._parts, self._sbatch, self._options = parts, sbatch, options
        self._detach = detach

    def await_units(self, number: int, units: Sequence[WorkUnit]) -> None:
        """Submit the parts that lack something and are not queued; follow them to their end."""
        count = min(self._parts, len(units))
        job_file = self.out / FOLDER / JOBS
        missing = {unit.content for unit in state_of(self.run, self.out, number).missing}
        parts = parts_of(self.run, units, count)
        lacking = [k for k, part in enumerate(parts) if any(u.content in missing for u in part)]
        jobs = _jobs(job_file, number, count)
        queued = _queued(jobs)
        if submit := [k for k in lacking if k not in queued]:
            script = self._write_script(count)
            jobs = [*jobs, _submit(script, submit)]
            write_whole(job_file, json.dumps({"round": number, "parts": count, "jobs": jobs}))
            self.watch.note(f"submitted parts {_ranges(submit)} of {count} as job {jobs[-1]}")
        if self._detach and lacking:
            state = state_of(self.run, self.out, number)
            raise Detached(number, state.missing, len(units))
        while _queued(jobs):
            show(self.out, self.watch)
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _write_script(self, count: int) -> Path:
        folder = self.out.absolute() / FOLDER
        script = folder / SCRIPT
        command = [sys.executable, "-m", "qaudit", "part", str(self.out.absolute())]
        text = TEXT.format(
            script=shlex.quote(str(script)),
            here=Path.cwd(),
            log=folder / f"%a-of-{count}.log",
            options="\n".join(f"#SBATCH {option}" for option in self._sbatch),
            command=shlex.join([*command, *self._options]),
            count=count,
        )
        write_whole(script, text)
        return script


def _jobs(path: Path, number: int, count: int) -> list[str]:
    """Return the jobs that were submitted for the same parts of the same round."""
    try:
        submitted = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    same = (submitted.get("round"), submitted.get("parts")) == (number, count)
    return [str(job) for job in submitted.get("jobs", ())] if same else []


def _submit(script: Path, parts: Sequence[int]) -> str:
    return _ran("sbatch", "--parsable", f"--array={_ranges(parts)}", str(script)).partition(";")[0]


def _queued(jobs: Sequence[str]) -> set[int]:
    if not jobs:
        return set()
    listed = _ran("squeue", "--noheader", "--array", "--me", "--format=%F %K")
    rows = (line.split() for line in listed.splitlines())
    return {int(row[1]) for row in rows if len(row) == 2 and row[0] in jobs and row[1].isdecimal()}


def _ran(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=120
        ).stdout.strip()
    except FileNotFoundError as error:
        raise MachineError(
            f"there is no `{command[0]}` here",
            hint="run it on a login node of the cluster, or use `--executor local`",
        ) from error
    except subprocess.CalledProcessError as error:
        why = " ".join((error.stderr or error.stdout).split())
        raise MachineError(
            f"`{command[0]}` refused: {why}",
            hint="give what the site needs with `--slurm '--account=NAME --partition=NAME'`",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise MachineError(
            f"`{command[0]}` did not answer in 120 s", hint="run the same command again"
        ) from error


def _ranges(parts: Iterable[int]) -> str:
    """Write numbers as Slurm does: 0,3-5."""
    text: list[list[int]] = []
    for part in sorted(parts):
        if text and part == text[-1][-1] + 1:
            text[-1][1:] = [part]
        else:
            text.append([part])
    return ",".join("-".join(map(str, some)) for some in text)
