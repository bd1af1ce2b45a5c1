"""Parts as processes of this machine, and as a Slurm job array.

A process of its own for each part has a CUDA context of its own: what is killed or runs out of
memory takes nothing with it. There are several parts for each worker, taken as they come, so that
no worker waits for long at the end.

Slurm is the queue, and requeues what is preempted. Its accounting is not used, because many sites
have none: records on disk tell what is done, `squeue` what still runs, and everything else is
missing and submitted again by the next run. The script that it runs stays in the folder.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from qaudit.errors import MachineError, OtherIdentityError, UsageError
from qaudit.executors.folder import parts_of, show
from qaudit.executors.records import Due, Executor, state_of
from qaudit.host import default_stream_limit
from qaudit.saved.parts import FOLDER
from qaudit.types import WorkUnit
from qaudit.whole import write_whole

PARTS_PER_WORKER = 4
TRIES = 2  # of a part in one run
SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_BARS = 0.5, 5.0
_ENDED = (0, 3)  # done; done, and some subjects cannot be measured


Workers = Mapping[str, Mapping[str, str]]
"""Where parts can run, by name: the variables of the process."""


def cpu_workers(count: int) -> Workers:
    """Return so many workers without a GPU of their own."""
    return {f"worker {k}": {} for k in range(count)}


def gpu_workers(text: str) -> Workers:
    """Return a worker for each GPU that is asked for: a number, or `all` that are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = [name.strip() for name in visible.split(",")]
    else:
        lines: list[str] = []
        with suppress(OSError, subprocess.SubprocessError):
            command = ["nvidia-smi", "-L"]
            answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
            lines = answer.stdout.splitlines()
        whole = [line for line in lines if line.startswith("GPU ")]  # others are MIG's
        listed = [str(place) for place, _ in enumerate(whole)]
    # CUDA sees none of those behind the first that is none.
    names = [*dict.fromkeys(takewhile(lambda name: name not in ("", "-1"), listed))]
    count = len(names) if text == "all" else int(text)
    if not names or count > len(names):
        raise MachineError(
            f"`--gpus {text}` asks for more GPUs than the {len(names)} that are visible here",
            hint=f"ask for at most {len(names)}" if names else "use `--set executor=local`",
        )
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {f"GPU {name}": {**order, "CUDA_VISIBLE_DEVICES": name} for name in names[:count]}


@dataclass(eq=False, kw_only=True)
class Pool(Executor):
    """The executor of one machine with several GPUs."""

    workers: Workers
    options: Sequence[str] = ()  # of each `qaudit part`

    def __post_init__(self) -> None:
        # Each process would take as much as one alone.
        if not any(word.startswith("stream_memory=") for word in self.options):
            each = default_stream_limit() // len(self.workers)
            self.options = [*self.options, "--set", f"stream_memory={each}B"]

    def await_units(self, number: int, units: Sequence[WorkUnit]) -> None:
        """Run the parts that lack something, until each has ended or failed twice."""
        count = PARTS_PER_WORKER * len(self.workers)
        state = state_of(self.run, self.out, number)
        parts = parts_of(self.run, units, count)
        waiting = deque(_holding(parts, (*state.missing, *state.failed)))
        tries = dict.fromkeys(waiting, 0)
        running: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}
        free, shown = list(self.workers), 0.0
        try:
            while (waiting and free) or running:
                while waiting and free:
                    worker, part = free.pop(0), waiting.popleft()
                    tries[part] += 1
                    running[worker] = part, self._start(worker, part, count)
                time.sleep(SECONDS_BETWEEN_LOOKS)
                for worker, (part, process) in list(running.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    del running[worker]
                    if code != OtherIdentityError.code:  # this device gets no other part
                        free.append(worker)
                    if code not in _ENDED:
                        self.watch.note(f"part {part}/{count} on {worker} ended with {code}")
                        if tries[part] < TRIES:
                            waiting.append(part)
                if time.monotonic() - shown > SECONDS_BETWEEN_BARS:
                    shown = time.monotonic()
                    show(self.run, self.out, self.watch)
        finally:
            _stop([process for _, process in running.values()])

    def _start(self, worker: str, part: int, count: int) -> subprocess.Popen[bytes]:
        folder = self.out / FOLDER
        command = [sys.executable, "-m", "qaudit", "part", str(self.out.absolute()), "--part"]
        with (folder / f"{part}-of-{count}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, f"{part}/{count}", *self.options],
                env={**os.environ, **self.workers[worker]},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # an interrupt comes to this process, which stops them
            )


def _holding(parts: Sequence[Sequence[WorkUnit]], units: Sequence[WorkUnit]) -> list[int]:
    """Return the numbers of parts that have some of these units."""
    contents = {unit.content for unit in units}
    return [k for k, part in enumerate(parts) if any(unit.content in contents for unit in part)]


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask processes to end, which keeps what they measured; kill those that do not."""
    for process in processes:
        with suppress(OSError):
            process.terminate()
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


SCRIPT, JOBS = "job.sbatch", "slurm.json"
SECONDS_BETWEEN_QUEUE_LOOKS = 5.0

TEXT = """\
#!/bin/bash
# Written by `qaudit scan`. Submit parts yourself: sbatch --array=0,3-5 {script}
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


@dataclass(eq=False, kw_only=True)
class Slurm(Executor):
    """The executor of a cluster."""

    parts: int  # tasks of an array at most
    sbatch: Sequence[str] = ()  # its options
    options: Sequence[str] = ()  # of `qaudit part`
    detach: bool = False

    def await_units(self, number: int, units: Sequence[WorkUnit]) -> None:
        """Submit the parts that lack something and are not queued; follow them to their end."""
        count = min(self.parts, len(units))
        job_file = self.out / FOLDER / JOBS
        state = state_of(self.run, self.out, number)
        lacking = _holding(parts_of(self.run, units, count), state.missing)
        jobs = _jobs(job_file, number, count)
        queued = _queued(jobs)
        if submit := [k for k in lacking if k not in queued]:
            folder = self.out.absolute() / FOLDER
            script = folder / SCRIPT
            command = [sys.executable, "-m", "qaudit", "part", str(self.out.absolute())]
            text = TEXT.format(
                script=shlex.quote(str(script)),
                here=_quoted(str(Path.cwd())),
                log=_quoted(f"{str(folder).replace('%', '%%')}/%a-of-{count}.log"),
                options="\n".join(f"#SBATCH {option}" for option in self.sbatch),
                command=shlex.join([*command, *self.options]),
                count=count,
            )
            write_whole(script, text)
            answer = _ran("sbatch", "--parsable", f"--array={_ranges(submit)}", str(script))
            jobs = [*jobs, answer.partition(";")[0]]
            write_whole(job_file, json.dumps({"round": number, "parts": count, "jobs": jobs}))
            self.watch.note(f"submitted parts {_ranges(submit)} of {count} as job {jobs[-1]}")
        if self.detach and lacking:
            raise Detached(number, state.missing, len(units))
        while _queued(jobs):
            show(self.run, self.out, self.watch)
            time.sleep(SECONDS_BETWEEN_QUEUE_LOOKS)


def _quoted(path: str) -> str:
    """Return a path as a line of `#SBATCH` takes it: spaces would end it."""
    if not path.isprintable():
        raise UsageError(
            f"{path!r:.200} has a line break or another control character, which no job script can",
            hint="name another folder with `--out`, or run it in another one",
        )
    escaped = path.replace("\\", "\\\\").replace('"', '\\"')
    return path if re.fullmatch(r"[\w./%+=:,@-]+", path) else f'"{escaped}"'


def _jobs(path: Path, number: int, count: int) -> list[str]:
    """Return the jobs that were submitted for the same parts of the same round."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        submitted = json.loads(path.read_text(encoding="utf-8"))
        if (submitted["round"], submitted["parts"]) == (number, count):
            return [str(job) for job in submitted["jobs"]]
    return []


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
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or getattr(error, "stdout", None) or str(error)
        raise MachineError(
            f"`{command[0]}` failed: {' '.join(why.split())}",
            hint="on a login node, give what the site needs with "
            "`--set slurm='--account=NAME --partition=NAME'`; elsewhere `--set executor=local`",
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
