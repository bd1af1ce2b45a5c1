"""One part of a plan, measured in this process.

The whole plan is known and the whole text is cut, whatever the part: context, draws, keys and the
checkpoint before depend on all subjects. Then the units of the part are measured that have no
record yet. A record is written when its subject is done, so that a part may be stopped at any
moment and run again anywhere.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.diagnostics.previous import previous_of
from qaudit.diagnostics.registry import parse_diagnostics
from qaudit.errors import OtherIdentityError, UsageError
from qaudit.executors.cut import cut
from qaudit.executors.events import Compared, Failed, Measured
from qaudit.executors.on_disk import difference_text, states_of
from qaudit.executors.part_log import ATTEMPTS, PartLog, attempts
from qaudit.planning.pins import refuse_other_libraries
from qaudit.saved.diagnosed import DiagnosticRows
from qaudit.saved.documents import Failure, ResultDocument, TaskFile, UnitDocument
from qaudit.saved.parts import FOLDER, UNITS, read_run, unit_path, write_unit
from qaudit.saved.results import Filed, ResultStore, sha256_of
from qaudit.settings import RunOptions
from qaudit.types import SILENT, Checkpoint, Run, Watch, WorkUnit

if TYPE_CHECKING:
    from qaudit.engine.tasks import Task
    from qaudit.executors.in_process import Measuring
    from qaudit.executors.ready import Account, Ready
    from qaudit.hub import Hub

Event = Measured | Failed | Compared


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
    run, folder = read_run(out)
    with suppress(OSError):  # relative paths of the plan begin there, if the host has it
        os.chdir(folder)
    states = states_of(run, out)
    units = [units_of_part(run, state.units, number, count) for state in states]
    missing = [_of(mine, state.missing) for mine, state in zip(units, states, strict=True)]
    failed = [_of(mine, state.failed) for mine, state in zip(units, states, strict=True)]
    batches = [some for some in (*missing, *failed) if some]  # what failed may end the process
    if not batches:
        return PartOutcome(len(units[-1]), 0, ())
    refuse_other_libraries(run.pins)
    part = _Part(run, out, f"{number}-of-{count}", options)
    left = sum(map(len, batches))
    still_failed = tuple(part.measure(batches, watch))
    before = sum(map(len, (*missing[:-1], *failed[:-1])))
    return PartOutcome(len(units[-1]) + before, left - len(still_failed), still_failed)


def _of(units: Sequence[WorkUnit], lacking: Sequence[WorkUnit]) -> list[WorkUnit]:
    contents = {unit.content for unit in lacking}
    return [unit for unit in units if unit.content in contents]


def units_of_part(
    run: Run, units: Sequence[WorkUnit], number: int, count: int
) -> tuple[WorkUnit, ...]:
    """Return the units of a part in one round: the same whatever is measured already.

    Where units need a device of one kind, each part has all of those that need its own.
    """
    if any(unit.device for unit in units):
        from qaudit.engine.machine import device_name, open_device

        kind = device_name(open_device(run.plan.device, run.plan.dtype)[0])
        return tuple(unit for unit in units if unit.device == kind)
    parts = parts_of(run, units, count)
    return parts[number] if number < len(parts) else ()


def parts_of(run: Run, units: Sequence[WorkUnit], count: int) -> tuple[tuple[WorkUnit, ...], ...]:
    """Cut units of a plan into parts; a diagnostic may need the checkpoint before, too."""
    reads = any(one.reads_previous for one in parse_diagnostics(run.plan.recipe.diagnostics))

    def before(unit: WorkUnit) -> Checkpoint | None:
        return previous_of(unit.subject, run.plan.subjects) if reads else None

    return cut(units, count, before)


class _Part:
    def __init__(self, run: Run, out: Path, name: str, options: RunOptions) -> None:
        self._run, self._out, self._name = run, out, name
        pins = run.pins
        self._options = replace(
            options, out=out, self_check=pins.self_check, cross_check=pins.cross_check
        )
        self._paths: dict[str, Path] = {}

    def measure(self, batches: Sequence[Sequence[WorkUnit]], watch: Watch) -> Iterator[str]:
        """Measure units of rounds; yields the labels of those that could not be measured."""
        from qaudit.executors.ready import Account

        (self._out / FOLDER / UNITS).mkdir(parents=True, exist_ok=True)
        log = PartLog(self._out / FOLDER / f"{self._name}.jsonl", self._attempts_of, watch)
        with log:
            ready, hub = self._ready(watch)
            account = Account(ready.machine.device, hub)
            for units in batches:
                measuring = self._measuring(ready, hub, log, units)
                yield from self._measure(units, measuring, ready, account, log)

    def _measure(
        self,
        units: Sequence[WorkUnit],
        measuring: Measuring,
        ready: Ready,
        account: Account,
        log: PartLog,
    ) -> Iterator[str]:
        """Measure units of one round, in which each label is there once."""
        by_label = {unit.label: unit for unit in units}
        self._paths = {unit.label: unit_path(self._run, unit, self._out) for unit in units}
        began = time.monotonic()
        tried: list[WorkUnit] = []
        for unit in units:
            error = self._given_up(unit) or ready.refused.get(unit.label)
            if error is None:
                tried.append(unit)
                continue
            self._write(unit, Failed(unit.label, error), ready, account.environment(0.0))
            log.finished(unit.label, "failed", 0.0)
            yield unit.label
        for event in self._events(measuring, ready, tried):
            label = event.release.label if isinstance(event, Compared) else event.label
            rows = measuring.diagnoses.rows.get(label, DiagnosticRows())
            environment = account.environment(measuring.seconds_waited)
            self._write(by_label[label], event, ready, environment, rows)
            outcome = "failed" if isinstance(event, Failed) else "measured"
            log.finished(label, outcome, time.monotonic() - began)
            began = time.monotonic()
            if isinstance(event, Failed):
                yield label

    def _attempts_of(self, label: str) -> Path:
        return self._paths[label].with_suffix(".attempts")

    def _given_up(self, unit: WorkUnit) -> Any:
        from qaudit.errors import SourceError

        count = attempts(self._attempts_of(unit.label))
        if count < ATTEMPTS:
            return None
        return SourceError(
            f"{count} processes ended while they measured it",
            hint=f"look into `{FOLDER}/{self._name}.log`, then run the part again",
        )

    def _ready(self, watch: Watch) -> tuple[Ready, Hub | None]:
        """Check the device and the text before any weight is read."""
        import torch

        from qaudit.engine.machine import open_device
        from qaudit.executors.ready import make_ready, refuse_bad_device
        from qaudit.hub import open_hub

        plan, pins = self._run.plan, self._run.pins
        torch.set_num_threads(pins.threads)
        refuse_bad_device(*open_device(plan.device, plan.dtype))
        members = [c for s in plan.subjects for c, _ in s.members]
        on_hub = plan.texts or any(c.commit for c in (*members, *plan.shipped))
        hub = open_hub(watch=watch) if on_hub else None
        ready = make_ready(plan, self._options, hub)
        text = tuple(draw.sha256 for draw in ready.corpus.draws)
        if (text, dict(ready.corpus.items_sha256)) != (pins.text_sha256, pins.items_sha256):
            raise OtherIdentityError(
                "the text is not that of the plan: its tokens have another hash",
                hint="give the part the same files, Python and tokenizer, or plan again",
            )
        return ready, hub

    def _measuring(
        self, ready: Ready, hub: Hub | None, log: Watch, units: Sequence[WorkUnit]
    ) -> Measuring:
        from qaudit.executors.in_process import Measuring
        from qaudit.planning.prepare import Prepared

        plan = self._run.plan
        if plan.traffic is not None:
            budget = self._options.disk_budget
            plan = replace(plan, traffic=replace(plan.traffic, nbytes_disk_budget=budget))
        subjects = {subject.label for subject in plan.subjects}
        if all(u.passes[0].draw or u.device or u.label not in subjects for u in units):
            # diagnostics are of the first pass, and of subjects
            plan = replace(plan, recipe=replace(plan.recipe, diagnostics=()))
        own = self._out / FOLDER / self._name
        work = Prepared.of_run(replace(self._run, plan=plan), self._options, own, hub)
        store = ResultStore(self._out / "evidence")
        return Measuring(work, ready.machine, log, store, ready.subjects)

    def _events(
        self, measuring: Measuring, ready: Ready, units: Sequence[WorkUnit]
    ) -> Iterator[Event]:
        from qaudit.engine.tasks import Task

        tasks: list[Task] = []
        for unit in units:
            if not unit.subject.is_release:
                tasks += [Task.of(one, ready.corpus) for one in unit.passes]
        releases = [unit.subject for unit in units if unit.subject.is_release]
        yield from measuring.visit(tasks, releases)

    def _write(
        self,
        unit: WorkUnit,
        event: Event,
        ready: Ready,
        environment: dict[str, Any],
        rows: DiagnosticRows | None = None,
    ) -> None:
        from qaudit.executors.ready import protocol_of

        document = UnitDocument(
            run=self._run.identity,
            unit=unit.content,
            label=unit.label,
            part=self._name,
            host=platform.node(),
            failed_tasks=dict(ready.corpus.failed_tasks),
            diagnostics=rows or DiagnosticRows(),
            protocol=protocol_of(ready.corpus),
            environment=environment,
        )
        if isinstance(event, Failed):
            document = replace(document, error=Failure(event.error.message, event.error.hint))
        elif isinstance(event, Compared):
            document = replace(document, difference=difference_text(event.difference))
        else:
            plain = [(None, one) for one in event.results]
            results = tuple(self._result(p, one) for p, one in (*plain, *event.perturbed))
            failed = {k: Failure(error.message, error.hint) for k, error in event.failed}
            document = replace(document, results=results, failed_schemes=failed)
            if event.search is not None:
                found = event.search
                document = replace(document, search=found.row, findings=found.findings)
        write_unit(document, unit_path(self._run, unit, self._out))

    def _result(self, perturbed: Any, filed: Filed) -> ResultDocument:
        return ResultDocument(
            scheme=filed.measurement.scheme,
            spec=filed.measurement.spec,
            perturbed=perturbed,
            evidence=self._name_of(filed.path),
            sha256=sha256_of(filed.path),
            tasks=tuple(
                TaskFile(task=task, evidence=self._name_of(path), sha256=sha256_of(path))
                for task, path in filed.task_paths
            ),
        )

    def _name_of(self, path: Path) -> str:
        return path.relative_to(self._out).as_posix()
