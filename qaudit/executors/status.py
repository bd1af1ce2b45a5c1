"""How far the parts of a plan are, from their records, their logs and the queue. No torch."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qaudit.executors.folder import cost_of, parts_of
from qaudit.executors.records import (
    RoundState,
    is_number,
    read_logs,
    states_of,
)
from qaudit.host import is_running
from qaudit.report.format import duration, plural
from qaudit.saved.parts import FIRST, last_round, read_round, read_run, unit_path
from qaudit.types import Run, Watch, units_of

SILENT_SECONDS = 300.0
"""A part that wrote nothing for so long may be lost: a block of a large model takes less."""

QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "CONFIGURING")


@dataclass(frozen=True)
class PartState:
    """What the log of one part says last, and the queue or the processes of this host."""

    name: str  # K/N
    host: str
    state: str  # running, queued, silent, lost, stopped or done
    subject: str
    since: float  # when it began the subject
    records: tuple[tuple[str, float], ...]  # that it wrote, with the seconds of each

    @property
    def place(self) -> tuple[int, int]:
        """K and N."""
        number, _, count = self.name.partition("/")
        return int(number), int(count)


@dataclass(frozen=True)
class RunStatus:
    """A round, and the parts that have worked on the plan."""

    state: RoundState
    parts: tuple[PartState, ...]
    left_seconds: float | None  # of the running part that has most to do; None: not known
    waiting: tuple[str, ...]  # missing, and in no part that runs

    @property
    def table(self) -> dict[str, Any]:
        state = self.state
        return {
            "round": state.number,
            "subjects": len(state.units),
            "measured": len(state.units) - len(state.missing) - len(state.failed),
            "failed": [unit.label for unit in state.failed],
            "missing": [unit.label for unit in state.missing],
            "waiting": list(self.waiting),
            "seconds_left": self.left_seconds,
            "parts": [
                {"part": p.name, "host": p.host, "state": p.state, "subject": p.subject}
                for p in self.parts
            ],
        }


def run_status(out: Path, *, quick: bool = False) -> RunStatus:
    """Read the records and the logs of a folder, and ask the queue for the jobs that logs name.

    A bar is drawn every few seconds: `quick` opens no evidence, and does not ask the queue.
    """
    run = read_run(out)
    logs = {name: lines for name, lines in read_logs(out).items() if _start(lines)}
    jobs = [str(job) for lines in logs.values() if (job := _start(lines).get("job"))]
    queue = None if quick else _queue(jobs)
    parts = tuple(_part_state(name, lines, queue) for name, lines in logs.items())
    *earlier, last = states_of(run, out, quick=quick)
    lacking = tuple(unit for each in earlier for unit in each.missing)
    failed = tuple(unit for each in earlier for unit in each.failed)
    state = RoundState(  # the last round with what the rounds before it lack
        last.number,
        (*lacking, *failed, *last.units),
        (*lacking, *last.missing),
        (*failed, *last.failed),
    )
    at_work = [part for part in parts if part.state == "running"]
    missing = {unit.content: unit for unit in state.missing}
    cuts = {count: parts_of(run, state.units, count) for count in {p.place[1] for p in at_work}}
    taken = []
    for number, count in (part.place for part in at_work):
        units = cuts[count][number] if number < len(cuts[count]) else ()
        taken.append([unit for unit in units if unit.content in missing])
    covered = {unit.content for units in taken for unit in units}
    pace = _pace(run, out, parts)
    seconds = None
    if pace and at_work:
        now = time.time()
        seconds = max(
            max(
                0.0,
                sum(map(cost_of, units)) / pace - (max(0.0, now - part.since) if units else 0.0),
            )
            for part, units in zip(at_work, taken, strict=True)
        )
    waiting = tuple(unit.label for content, unit in missing.items() if content not in covered)
    return RunStatus(state, parts, seconds, waiting)


def _pace(run: Run, out: Path, parts: Sequence[PartState]) -> float | None:
    """Return the cost that a part measures in a second, from all that parts measured."""
    rounds = (read_round(run, out, number) for number in range(FIRST, last_round(out) + 1))
    units = [unit for passes in rounds for unit in units_of(passes)]
    costs = {unit_path(run, unit, out).name: cost_of(unit) for unit in units}
    finished = [(costs[name], s) for part in parts for name, s in part.records if name in costs]
    seconds = sum(s for _, s in finished)
    return sum(cost for cost, _ in finished) / seconds if seconds else None


def _start(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return next((line for line in reversed(lines) if line.get("began")), {})


def _part_state(
    name: str, lines: Sequence[Mapping[str, Any]], queue: Mapping[str, str] | None
) -> PartState:
    start, last = _start(lines), lines[-1]
    subjects = [line for line in lines if line.get("subject")]
    ended, job, pid = last.get("ended"), start.get("job"), start.get("pid")
    is_here = start.get("host") == platform.node() and not job
    if ended:
        state = "done" if ended == "done" else "stopped"
    elif queue is not None and job:
        queued = queue.get(str(job))
        state = "lost" if queued is None else "queued" if queued in QUEUED else "running"
    elif is_here and not (type(pid) is int and is_running(pid)):
        state = "lost"
    else:  # a clock that is ahead says as little about a part as an old line
        is_new = abs(time.time() - float(last["at"])) < SILENT_SECONDS
        state = "running" if is_new else "silent"
    return PartState(
        name=name.replace("-of-", "/"),
        host=str(start.get("host", "")),
        state=state,
        subject=str(subjects[-1]["subject"]) if subjects and not ended else "",
        since=float(subjects[-1]["at"]) if subjects else float(start["at"]),
        records=tuple(
            (str(line["record"]), float(line["seconds"]))
            for line in lines
            if line.get("outcome") == "measured"
            and is_number(line.get("seconds"))
            and line.get("record")
        ),
    )


def _queue(jobs: Sequence[str]) -> dict[str, str] | None:
    """Return the states of jobs that Slurm still knows; None where it cannot be asked."""
    if not jobs:
        return None
    command = ["squeue", "--noheader", "--states=all", "--format=%A %T", f"--jobs={','.join(jobs)}"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    if completed.returncode and "Invalid job id" not in completed.stderr:
        return None
    rows = [line.split() for line in completed.stdout.splitlines()]
    at_work = (*QUEUED, "RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING")
    return {row[0]: row[1] for row in rows if len(row) == 2 and row[1] in at_work}


def show(out: Path, watch: Watch) -> None:
    status = run_status(out, quick=True)
    total, missing = len(status.state.units), len(status.state.missing)
    watch.count("subjects", total - missing, total, status.left_seconds)


def render(status: RunStatus) -> str:
    state, table = status.state, status.table
    first = (
        f"round {state.number}: {table['measured']} of {plural(len(state.units), 'subject')} "
        f"measured, {len(state.failed)} failed, {len(state.missing)} missing"
    )
    if status.left_seconds is not None:
        first += f"; about {duration(status.left_seconds)} left in the parts that run"
    if status.waiting:
        are = "is" if len(status.waiting) == 1 else "are"
        first += f"; {plural(len(status.waiting), 'subject')} {are} in no part that runs"
    rows = [
        f"  part {part.name:<8} {part.state:<8} {part.host} {part.subject}".rstrip()
        for part in status.parts
    ]
    return "\n".join([first, *rows])
