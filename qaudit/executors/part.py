"""Units measured in this process: one part of a plan, or all of it.

The whole plan is known and the whole text is cut, whatever the part: context, draws, keys and the
checkpoint before depend on all subjects. A record is written when its subject is done, so that a
part may be stopped at any moment and run again anywhere. A scan in one process is part 0 of 1.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from qaudit.engine.tasks import Task, device_name, open_device
from qaudit.errors import OtherIdentityError, SourceError, UsageError
from qaudit.executors.folder import parts_of, pinned
from qaudit.executors.measuring import Measuring
from qaudit.executors.ready import Account, Ready, make_ready, protocol_of, refuse_bad_device
from qaudit.executors.records import (
    ATTEMPTS,
    Executor,
    PartLog,
    UnitOutcome,
    attempts,
    record_of,
    states_of,
)
from qaudit.hub import Hub, open_hub
from qaudit.planning.passes import planned_rounds
from qaudit.planning.pin import refuse_other_libraries
from qaudit.planning.prepare import Prepared
from qaudit.report.folder import must_take_files
from qaudit.saved.documents import DiagnosticRows, UnitDocument
from qaudit.saved.parts import (
    DIRECTORY,
    FIRST,
    FOLDER,
    UNITS,
    one_writer,
    read_run,
    unit_path,
    write_unit,
)
from qaudit.saved.results import ResultStore
from qaudit.settings import RunOptions
from qaudit.types import SILENT, Run, Watch, WorkUnit, units_of


class PartExecutor(Executor):
    """Measures units in this process."""

    def __init__(
        self,
        run: Run,
        out: Path,
        ready: Ready,
        hub: Hub | None,
        watch: Watch = SILENT,
        *,
        name: str = "0-of-1",
        alone: bool = True,
    ) -> None:
        """Measure with what is ready; `alone`: no other process measures units of this plan."""
        super().__init__(run, out, watch)
        _must_be_one_kind(out / FOLDER, ready.machine.device)
        self._ready, self._name, self._alone = ready, name, alone
        self._units: dict[str, WorkUnit] = {}  # of the round, by label
        self._tried: set[str] = set()
        self.failed: list[str] = []
        attempts_of = None if alone else self._attempts_of
        self._log = PartLog(out / FOLDER / f"{name}.jsonl", attempts_of, watch)
        self._account = Account(ready.machine.device, hub)
        self._measuring = Measuring(
            run.plan,
            out if alone else out / FOLDER / name,
            hub,
            ready.machine,
            self._log,
            ResultStore(out / "evidence"),
            () if alone else ready.subjects,
        )

    def await_units(self, number: int, units: Sequence[WorkUnit]) -> None:
        if self._alone and number == FIRST:  # weights that searches read, too, are fetched once
            units = units_of(tuple(chain(*planned_rounds(self.run.plan.passes))))
        units = [unit for unit in units if unit.content not in self._tried]
        if not units:
            return
        self._tried |= {unit.content for unit in units}
        self._units = {unit.label: unit for unit in units}
        with self._log:
            began = time.monotonic()
            refused = {unit.label: error for unit in units if (error := self._refused(unit))}
            for label, error in refused.items():
                self._write(UnitOutcome(label, error=error), began)
            tried = [unit for unit in units if unit.label not in refused]
            planned = {subject.label for subject in self.run.plan.subjects}
            first = (unit for unit in units if not unit.passes[0].draw)
            began = time.monotonic()
            for outcome in self._measuring.visit(
                [Task.of(p, self._ready.corpus) for u in tried for p in u.passes],
                {unit.label for unit in first if unit.label in planned},
            ):
                self._write(outcome, began)
                began = time.monotonic()

    def _refused(self, unit: WorkUnit) -> SourceError | None:
        """Return why a unit is not tried: it ended processes, or small files are missing."""
        count = 0 if self._alone else attempts(self._attempts_of(unit.label))
        if count < ATTEMPTS:
            return self._ready.refused.get(unit.label)
        hint = f"look into `{FOLDER}/{self._name}.log`, then run the part again"
        return SourceError(f"{count} processes ended while they measured it", hint=hint)

    def _attempts_of(self, label: str) -> Path:
        return unit_path(self.run, self._units[label], self.out).with_suffix(".attempts")

    def _write(self, outcome: UnitOutcome, began: float) -> None:
        unit = self._units[outcome.label]
        path = unit_path(self.run, unit, self.out)
        document = UnitDocument(
            run=self.run.identity,
            unit=unit.content,
            label=unit.label,
            part=self._name,
            host=platform.node(),
            failed_tasks=dict(self._ready.corpus.failed_tasks),
            diagnostics=self._measuring.diagnoses.rows.get(unit.label, DiagnosticRows()),
            protocol=protocol_of(self._ready.corpus),
            environment=self._account.environment(self._measuring.seconds_waited),
            **record_of(outcome, self.out),
        )
        write_unit(document, path)
        state = "failed" if outcome.error is not None else "measured"
        self._log.finished(unit.label, state, time.monotonic() - began, path)
        if outcome.error is not None:
            self.failed.append(unit.label)


def _must_be_one_kind(folder: Path, device: torch.device) -> None:
    """Refuse a GPU of another kind than the first that measured here: kinds round otherwise."""
    kind, path = device_name(device), folder / f"{device.type}.kind"
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(kind)
    first = path.read_text(encoding="utf-8")
    if first not in (kind, ""):  # nothing: of a part that starts now
        raise OtherIdentityError(
            f"this device is `{kind}`, and `{folder.parent}` was begun on `{first}`, which rounds "
            "otherwise",
            hint=f"use `{first}` for all parts, or `{kind}` for all in another `--out`",
        )


def whole_plan(prepared: Prepared, watch: Watch = SILENT) -> PartExecutor:
    """Pin a plan and return this process as its only part."""
    must_take_files(prepared.out)
    with one_writer(prepared.out):
        prepared.write_plan()
    ready = make_ready(prepared.plan, prepared.options, prepared.hub)
    run = pinned(prepared, ready.corpus, torch.get_num_threads())
    return PartExecutor(run, prepared.out, ready, prepared.hub, watch)


@dataclass(frozen=True)
class PartOutcome:
    """How many units a part has, and how many it measured now and could not measure."""

    units: int
    measured: int
    failed: tuple[str, ...]


def run_part(
    out: Path, number: int, count: int, options: RunOptions, watch: Watch = SILENT
) -> PartOutcome:
    """Measure what part `number` of `count` lacks, and what failed before, in all rounds so far."""
    if not 0 <= number < count:
        raise UsageError(
            f"there is no part {number} of {count}",
            hint=f"parts are 0/{count} to {count - 1}/{count}",
        )
    out = out.absolute()
    run = read_run(out)
    with suppress(OSError, ValueError):  # relative paths of the plan begin there, if they exist
        os.chdir((out / FOLDER / DIRECTORY).read_text(encoding="utf-8"))
    states = states_of(run, out)
    units = [units_of_part(run, state.units, number, count) for state in states]
    missing = [_of(mine, state.missing) for mine, state in zip(units, states, strict=True)]
    failed = [_of(mine, state.failed) for mine, state in zip(units, states, strict=True)]
    batches = [some for some in (*missing, *failed) if some]  # what failed may end the process
    if not batches:
        return PartOutcome(len(units[-1]), 0, ())
    refuse_other_libraries(run.pins)
    part = _part(run, out, f"{number}-of-{count}", options, watch)
    for some in batches:
        part.await_units(0, some)
    before = sum(map(len, (*missing[:-1], *failed[:-1])))
    measured = sum(map(len, batches)) - len(part.failed)
    return PartOutcome(len(units[-1]) + before, measured, tuple(part.failed))


def _of(units: Sequence[WorkUnit], lacking: Sequence[WorkUnit]) -> list[WorkUnit]:
    contents = {unit.content for unit in lacking}
    return [unit for unit in units if unit.content in contents]


def units_of_part(
    run: Run, units: Sequence[WorkUnit], number: int, count: int
) -> tuple[WorkUnit, ...]:
    """Return the units of a part in one round: the same whatever is measured already."""
    parts = parts_of(run, units, count)
    return parts[number] if number < len(parts) else ()


def _part(run: Run, out: Path, name: str, options: RunOptions, watch: Watch) -> PartExecutor:
    """Check the device and the text before any weight is read."""
    plan, pins = run.plan, run.pins
    (out / FOLDER / UNITS).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(pins.threads)
    refuse_bad_device(*open_device(plan.device, plan.dtype))
    members = [source for s in plan.subjects for c, _ in s.members for source in c.sources]
    on_hub = plan.texts or any(c.commit for c in (*members, *plan.shipped))
    hub = open_hub(watch=watch) if on_hub else None
    ready = make_ready(plan, replace(options, out=out), hub)
    if (ready.corpus.text_sha256, dict(ready.corpus.items_sha256)) != (
        pins.text_sha256,
        pins.items_sha256,
    ):
        raise OtherIdentityError(
            "the text is not that of the plan: its tokens have another hash",
            hint="give the part the same files, Python and tokenizer, or plan again",
        )
    if plan.traffic is not None:
        traffic = replace(plan.traffic, nbytes_disk_budget=options.disk_budget)
        run = replace(run, plan=replace(plan, traffic=traffic))
    return PartExecutor(run, out, ready, hub, watch, name=name, alone=False)
