"""The folder of a pinned plan: cut into parts, filled from copies of it, and how far it is.

No torch.

Units follow the order of the series, twins beside each other and soups behind the last of their
members; the line is cut where the largest part becomes smallest. A part is a stretch of the line,
so that only soups and the checkpoint before the first one need weights that another part has, too.
Where stretches cannot be even, because models of several sizes follow one another, the largest
units are dealt first, each to the part that is cheapest with it.
The same units and the same number of parts give the same cut in every process.

Results of copies are taken by content and never over anything.
"""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from qaudit.core.course import previous_of
from qaudit.core.registry import parse_scheme
from qaudit.diagnostics.diagnostic import parse_diagnostics
from qaudit.errors import HubError, UsageError
from qaudit.executors.records import RoundState, is_number, read_logs, read_record, states_of
from qaudit.host import is_running
from qaudit.hub import open_hub
from qaudit.items.prepare import fetch_items
from qaudit.planning.pin import NUMERICS, pinned_libraries
from qaudit.planning.prepare import Prepared
from qaudit.report.format import duration, plural
from qaudit.saved import codec
from qaudit.saved.exports import kept_files
from qaudit.saved.parts import (
    FIRST,
    evidence_of,
    last_round,
    one_writer,
    read_round,
    read_run,
    unit_path,
)
from qaudit.text.texts import fetch_texts
from qaudit.types import SILENT, Corpus, Pins, Run, Subject, Watch, WorkUnit, units_of
from qaudit.whole import copy_whole

FLOPS_PER_BYTE = 1e5
"""What reading a byte of weights costs, as arithmetic: a GPU does 100 TFLOP/s while 1 GB comes."""

UNEVEN = 1.1
"""A largest part so many times the lower bound is too large."""


def cost_of(unit: WorkUnit) -> float:
    return unit.flops + FLOPS_PER_BYTE * sum(checkpoint.nbytes for checkpoint in unit.checkpoints)


def in_line(units: Sequence[WorkUnit]) -> tuple[WorkUnit, ...]:
    """Return units with twins beside each other and soups behind the last of their members."""
    first: dict[str, int] = {}
    for place, unit in enumerate(units):
        for checkpoint in unit.checkpoints:
            if unit.subject.merge is None or checkpoint.content not in first:
                first.setdefault(checkpoint.content, place)

    def place_of(place: int) -> tuple[int, bool, int]:
        unit = units[place]
        last = max(first[checkpoint.content] for checkpoint in unit.checkpoints)
        return last, unit.subject.merge is not None, place

    return tuple(units[place] for place in sorted(range(len(units)), key=place_of))


def cut(
    units: Sequence[WorkUnit], count: int, series: Sequence[Subject] = ()
) -> tuple[tuple[WorkUnit, ...], ...]:
    """Cut units into at most so many parts, the largest of which is as small as can be.

    Diagnostics of a unit read the checkpoint before in the series, too.
    """
    groups: dict[str, list[WorkUnit]] = {}
    for unit in in_line(units):
        groups.setdefault(unit.subject.content, []).append(unit)
    if not groups:
        return ()
    line = [_Group(group, series) for group in groups.values()]
    costs = [line_cost([group]) for group in line]
    low, high = max(costs), sum(costs)
    for _ in range(60):  # to the last bit of a float
        middle = (low + high) / 2
        if len(_stretches(line, middle)) <= count:
            high = middle
        else:
            low = middle
    parts = _stretches(line, high)
    bound = max(line_cost(line) / count, *costs)
    if max(map(line_cost, parts)) > UNEVEN * bound:
        # Deal groups, the largest first, each to the part that is cheapest with it.
        dealt: list[list[int]] = [[] for _ in range(min(count, len(line)))]
        for place in sorted(range(len(line)), key=lambda place: -costs[place]):
            min(dealt, key=lambda part: line_cost([line[k] for k in (*part, place)])).append(place)
        of_dealt = [[line[place] for place in part] for part in sorted(map(sorted, dealt)) if part]
        parts = min(parts, of_dealt, key=lambda some: max(map(line_cost, some)))
    return tuple(tuple(unit for group in part for unit in group.units) for part in parts)


def parts_of(run: Run, units: Sequence[WorkUnit], count: int) -> tuple[tuple[WorkUnit, ...], ...]:
    diagnostics = parse_diagnostics(run.plan.recipe.diagnostics)
    reads = any(diagnostic.reads_previous for diagnostic in diagnostics)
    return cut(units, count, run.plan.subjects if reads else ())


class _Group:
    """Units that stay together: a subject and its twins, which share its measurements."""

    def __init__(self, units: Sequence[WorkUnit], series: Sequence[Subject]) -> None:
        self.units, self.flops = units, units[0].flops
        before = [previous_of(unit.subject, series) for unit in units]
        needed = [c for unit in units for c in unit.checkpoints] + [c for c in before if c]
        self.weights = {c.content: c.nbytes for c in needed}


def line_cost(groups: Sequence[_Group]) -> float:
    """Return the cost of groups one after another: weights that they share are read once."""
    weights = {content: nbytes for group in groups for content, nbytes in group.weights.items()}
    return sum(group.flops for group in groups) + FLOPS_PER_BYTE * sum(weights.values())


def _stretches(line: Sequence[_Group], limit: float) -> list[list[_Group]]:
    """Cut a line so that no part costs more than the limit, from the first unit on."""
    parts: list[list[_Group]] = []
    weights: dict[str, int] = {}
    cost = 0.0
    for group in line:
        new = {k: n for k, n in group.weights.items() if k not in weights}
        more = group.flops + FLOPS_PER_BYTE * sum(new.values())
        if not parts or cost + more > limit * (1 + 1e-12):
            parts.append([])
            weights, cost, more = {}, 0.0, line_cost([group])
        parts[-1].append(group)
        weights |= group.weights
        cost += more
    return parts


def pinned(prepared: Prepared, corpus: Corpus, threads: int) -> Run:
    """Write a plan with the text that was read for it, and return both."""
    plan = prepared.plan
    pins = Pins(
        threads=threads,
        libraries=pinned_libraries(
            map(parse_scheme, plan.specs), (subject.merge for subject in plan.subjects)
        ),
        numerics=NUMERICS,
        text_sha256=corpus.text_sha256,
        items_sha256=dict(corpus.items_sha256),
    )
    with one_writer(prepared.out):
        prepared.write_plan(pins)
    return Run(plan, pins)


def fetch_all(
    out: Path, *, code: bool = False, watch: Watch = SILENT
) -> tuple[int, int, int, dict[str, str]]:
    """Download texts, configurations, tokenizers and weights; a failure does not end the others.

    Returns how many checkpoints a plan needs of the Hub, how many of these are in the cache now,
    how many texts, and why others failed, by label.
    """
    run = read_run(out)
    plan = run.plan
    units = in_line(units_of(plan.passes))
    checkpoints = (source for unit in units for c in unit.checkpoints for source in c.sources)
    members = {c.content: c for c in checkpoints if c.commit}
    if not members and not plan.texts:
        return 0, 0, 0, {}
    hub = open_hub(watch=watch)
    fetcher = hub.fetcher
    fetch_texts(fetcher, plan.recipe, plan.texts)
    tasks = fetch_items(hub, plan.recipe, plan.texts)
    failed = {f"task {task}": error.message for task, error in tasks.items()}
    for checkpoint in members.values():
        try:
            fetcher.settings(checkpoint, code=code)
            fetcher.weights(checkpoint)
        except HubError as error:
            failed[checkpoint.label] = error.message
    whole = len(members) - (len(failed) - len(tasks))
    return len(members), whole, len(plan.texts), failed


def merge(source: Path, out: Path, run: Run) -> int:
    """Copy the units that `out` lacks; returns how many. Both folders have the same plan."""
    other = read_run(source)
    if other.identity != run.identity:
        raise UsageError(
            f"`{source}` was measured by another plan than `{out}`",
            hint="copy the folder of the plan to each place, and run the parts there",
        )
    copied = 0
    for number in range(1, last_round(out) + 1):
        for unit in units_of(read_round(run, out, number)):
            mine, copy = read_record(run, out, unit), read_record(run, source, unit)
            is_measured = mine is not None and mine.document.error is None
            if copy is not None and not is_measured:
                for name in dict.fromkeys(evidence_of(copy.document)):
                    copy_whole(source / name, out / name)
                codec.write(unit_path(run, unit, out), copy.document)
                copied += 1
    for path in kept_files(source):
        if not (target := out / path.relative_to(source)).exists():
            copy_whole(path, target)
    return copied


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


def _state(run: Run, out: Path, *, quick: bool = False) -> RoundState:
    """Return the last round with what the rounds before it lack; `quick` opens no evidence."""
    *earlier, last = states_of(run, out, quick=quick)
    lacking = tuple(unit for each in earlier for unit in each.missing)
    failed = tuple(unit for each in earlier for unit in each.failed)
    return RoundState(
        last.number,
        (*lacking, *failed, *last.units),
        (*lacking, *last.missing),
        (*failed, *last.failed),
    )


def run_status(out: Path) -> RunStatus:
    """Read the records and the logs of a folder, and ask the queue for the jobs that logs name."""
    run = read_run(out)
    state = _state(run, out)
    logs = {name: lines for name, lines in read_logs(out).items() if _start(lines)}
    jobs = [str(job) for lines in logs.values() if (job := _start(lines).get("job"))]
    queue = _queue(jobs)
    parts = tuple(_part_state(name, lines, queue) for name, lines in logs.items())
    at_work = [part for part in parts if part.state == "running"]
    missing = {unit.content: unit for unit in state.missing}
    cut_into = cache(lambda count: parts_of(run, state.units, count))
    taken = []
    for part in at_work:
        number, count = map(int, part.name.split("/"))
        units = cut_into(count)[number] if number < len(cut_into(count)) else ()
        taken.append([unit for unit in units if unit.content in missing])
    covered = {unit.content for units in taken for unit in units}
    # The cost that a part measures in a second, from all that parts measured.
    rounds = (read_round(run, out, number) for number in range(FIRST, last_round(out) + 1))
    every = [unit for passes in rounds for unit in units_of(passes)]
    costs = {unit_path(run, unit, out).name: cost_of(unit) for unit in every}
    finished = [(costs[name], s) for part in parts for name, s in part.records if name in costs]
    cost, spent = sum(cost for cost, _ in finished), sum(s for _, s in finished)
    seconds = None
    if cost and spent and at_work:
        now, seconds = time.time(), 0.0
        for part, lacking_units in zip(at_work, taken, strict=True):
            since = max(0.0, now - part.since) if lacking_units else 0.0
            seconds = max(seconds, sum(map(cost_of, lacking_units)) * spent / cost - since)
    waiting = tuple(unit.label for content, unit in missing.items() if content not in covered)
    return RunStatus(state, parts, seconds, waiting)


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


def show(run: Run, out: Path, watch: Watch) -> None:
    state = _state(run, out, quick=True)
    watch.count("subjects", len(state.units) - len(state.missing), len(state.units))


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
