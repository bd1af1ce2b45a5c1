"""What parts have measured, read back as the events of an executor. No torch, no weights.

Records and evidence on disk are the truth: which process wrote them, when and where changes
nothing. What is missing is named, and its round is written for the next parts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qaudit.core.merges.mean import Mean
from qaudit.diagnostics.registry import parse_diagnostics
from qaudit.errors import MissingParts, SourceError
from qaudit.executors.events import RETRY_TASK, Compared, Ended, Event, Failed, Measured, Started
from qaudit.executors.part_log import read_logs
from qaudit.judge.released import WeightDifference
from qaudit.planning.passes import candidates_of, last_of_each_kind
from qaudit.saved.diagnosed import tables_of
from qaudit.saved.documents import ResultDocument, UnitDocument
from qaudit.saved.identity import must_be_complete, must_be_of, must_be_pass
from qaudit.saved.parts import FIRST, last_round, read_round, read_unit, unit_path, write_round
from qaudit.saved.results import Filed, SearchResult, read_measurement, with_tasks
from qaudit.types import SILENT, Pass, Plan, Run, Subject, Watch, WorkUnit, units_of

LAG_SECONDS, LOOK_SECONDS = 60.0, 2.0


class Due(MissingParts):
    """A round of which units are missing."""

    def __init__(self, number: int, missing: Sequence[WorkUnit], of: int) -> None:
        self.round, self.missing = number, tuple(missing)
        names = ", ".join(f"`{unit.name}`" for unit in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        subjects, are = "subject" + "s" * (of != 1), "is" if len(missing) == 1 else "are"
        what = f"round {number} has {of} {subjects}, and {len(missing)} {are} not measured yet"
        super().__init__(f"{what}: {names}{more}")


class OnDisk:
    """The executor that measures nothing: it reads what parts have measured."""

    def __init__(self, run: Run, out: Path, watch: Watch = SILENT) -> None:
        self.run, self.out, self.watch = run, out, watch
        self._round = FIRST - 1

    def execute(self, plan: Plan, passes: Sequence[Pass]) -> Iterator[Event]:
        """Yield the events of passes in their order; searches are the last round of them."""
        documents: dict[str, UnitDocument] = {}
        for some in filter(None, rounds_of(passes)):
            self._round += 1
            documents |= self._documents(some)
        ordered = [documents[unit.content] for unit in units_of(passes)]
        yield Started(ordered[0].protocol)
        for task, reason in ordered[0].failed_tasks.items():
            yield Failed(f"task {task}", SourceError(reason, hint=RETRY_TASK))
        for unit, document in zip(units_of(passes), ordered, strict=True):
            yield self._event(unit, document)
        environment = {
            **environment_of([*documents.values()]),
            "measured_on": _devices_of_last(plan, ordered),
        }
        by_label = {document.label: document for document in ordered}
        yield Ended(environment, self._diagnostics(plan, by_label))

    def _documents(self, passes: Sequence[Pass]) -> dict[str, UnitDocument]:
        if self._round > FIRST:
            write_round(self._round, passes, self.run, self.out)
        units = units_of(passes)
        self.await_units(self._round, units)
        found = self._settled(units)
        missing = [u for u in units if not self.is_whole(u, found[u.content])]
        if missing:
            raise Due(self._round, missing, len(units))
        return {content: document for content, document in found.items() if document}

    def _settled(self, units: Sequence[WorkUnit]) -> dict[str, UnitDocument | None]:
        """Read the records of units; look again for those that a log names and that are not there.

        A network file system shows a file to another host up to a minute after it was written.
        """
        ends, noted = time.monotonic() + LAG_SECONDS, False
        while True:
            found = {unit.content: read_unit(self.run, unit, self.out) for unit in units}
            late = self._late(units, found)
            if not late or time.monotonic() >= ends:
                return found
            if not noted:
                self.watch.note(
                    f"waiting up to {LAG_SECONDS:.0f} s until `{late[0]}` is visible here"
                )
            noted = True
            time.sleep(LOOK_SECONDS)

    def _late(
        self, units: Sequence[WorkUnit], found: Mapping[str, UnitDocument | None]
    ) -> list[str]:
        """Return the files that were written, and are not there."""
        late = [self.out / name for one in found.values() if one for name in evidence_of(one)]
        missing = {unit_path(self.run, u, self.out) for u in units if found[u.content] is None}
        if missing:
            logged = {line.get("record") for log in read_logs(self.out).values() for line in log}
            late += [path for path in missing if path.name in logged]
        listed = {folder: _names_in(folder) for folder in {path.parent for path in late}}
        return [path.name for path in late if path.name not in listed[path.parent]]

    def await_units(self, number: int, units: Sequence[WorkUnit]) -> None:
        """Have units measured, where an executor can: here they are there or missing."""

    def is_whole(self, unit: WorkUnit, document: UnitDocument | None) -> bool:
        """Return whether a unit's evidence is there as it was written, all of it and its own."""
        if document is None:
            return False
        try:
            results = [self._filed(unit, document, result) for result in document.results]
            seeds = [one.measurement.calibration_seed for one in results]
            must_be_complete(unit, document, seeds)
        except (OSError, ValueError):
            return False
        return True

    def _event(self, unit: WorkUnit, document: UnitDocument) -> Event:
        subject, label = unit.subject, unit.label
        if document.error is not None:
            return Failed(unit.name, SourceError(document.error.message, hint=document.error.hint))
        if document.difference is not None:
            return Compared(subject, difference_of(document.difference))
        results = [(one.perturbed, self._filed(unit, document, one)) for one in document.results]
        plain = tuple(filed for perturbed, filed in results if perturbed is None)
        if unit.device is not None:
            return Measured(label, (), elsewhere=tuple((unit.device, filed) for filed in plain))
        search = None
        if document.search is not None:
            soup = _soup(subject, document.search.members)
            search = SearchResult(soup, plain, document.search, document.findings)
        return Measured(
            label,
            plain,
            tuple((p, filed) for p, filed in results if p is not None),
            search,
            tuple(
                (scheme, SourceError(one.message, hint=one.hint))
                for scheme, one in document.failed_schemes.items()
            ),
        )

    def _filed(self, unit: WorkUnit, document: UnitDocument, result: ResultDocument) -> Filed:
        """Return a result; ValueError if its files are damaged, or of something else."""
        path, search = self.out / result.evidence, document.search
        subject = unit.subject if search is None else _soup(unit.subject, search.members)
        measurement = read_measurement(path, result.sha256)
        must_be_of(measurement, subject or unit.subject, result.spec)
        must_be_pass(measurement, result.perturbed, document.protocol)
        filed = Filed(replace(measurement, subject=unit.label, scheme=result.scheme), path)
        tasks = (self.out / one.evidence for one in result.tasks)
        parts = [
            Filed(read_measurement(path, one.sha256), path)
            for path, one in zip(tasks, result.tasks, strict=True)
        ]
        for part in parts:
            must_be_of(part.measurement, subject or unit.subject, result.spec)
        return with_tasks(filed, parts)

    def _diagnostics(self, plan: Plan, documents: Mapping[str, UnitDocument]) -> Any:
        measured = [s for s in plan.subjects if s.label in documents]
        labels = [s.label for s in measured if documents[s.label].error is None]
        rows = {label: document.diagnostics for label, document in documents.items()}
        return tables_of(parse_diagnostics(plan.recipe.diagnostics), rows, labels, measured)


def _names_in(folder: Path) -> set[str]:
    """List a folder, which makes a network file system look anew."""
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


def evidence_of(document: UnitDocument) -> list[str]:
    """Return the names of a unit's files of evidence."""
    names = [one.evidence for one in document.results]
    names += [file.evidence for one in document.results for file in one.tasks]
    tables = document.diagnostics.rows.values()
    return names + [str(row["details"]) for rows in tables for row in rows if row.get("details")]


def rounds_of(passes: Sequence[Pass]) -> tuple[tuple[Pass, ...], ...]:
    """Return the passes that need nothing, then candidates, then searches: these look them up."""
    return (
        tuple(one for one in passes if not one.subject.is_search),
        candidates_of(passes),
        tuple(one for one in passes if one.subject.is_search),
    )


@dataclass(frozen=True)
class RoundState:
    """A round that is due: its units, and those that are not measured."""

    number: int
    units: tuple[WorkUnit, ...]
    missing: tuple[WorkUnit, ...]
    failed: tuple[WorkUnit, ...]


def state_of(run: Run, out: Path, number: int, *, quick: bool = False) -> RoundState:
    """Return how far a round is; `quick` opens no evidence."""
    passes = read_round(run, out, number)
    if number == FIRST:  # searches are due when the others are measured
        passes = next(filter(None, rounds_of(passes)), ())
    units = units_of(passes)
    reader = OnDisk(run, out)
    documents = {unit.content: read_unit(run, unit, out) for unit in units}
    return RoundState(
        number,
        units,
        tuple(
            unit
            for unit in units
            if (one := documents[unit.content]) is None or not (quick or reader.is_whole(unit, one))
        ),
        tuple(u for u in units if (one := documents[u.content]) is not None and one.error),
    )


def states_of(run: Run, out: Path, *, quick: bool = False) -> tuple[RoundState, ...]:
    """Return how far every round is that is due, or was."""
    rounds = range(FIRST, last_round(out) + 1)
    return tuple(state_of(run, out, number, quick=quick) for number in rounds)


def _soup(search: Subject, members: Sequence[str]) -> Subject | None:
    """Return the soup that a search ended with, as the search made it; None for one member."""
    if len(members) < 2:
        return None
    checkpoints = [checkpoint for checkpoint, _ in search.members if checkpoint.label in members]
    shares = tuple((checkpoint, 1 / len(checkpoints)) for checkpoint in checkpoints)
    return Subject(search.label, shares, Mean().spec)


def difference_text(difference: WeightDifference) -> dict[str, str]:
    """Return a difference as text, which holds infinite numbers too."""
    return {name: json.dumps(value) for name, value in vars(difference).items()}


def difference_of(text: Mapping[str, str]) -> WeightDifference:
    """Return the difference that text holds."""
    return WeightDifference(**{name: json.loads(value) for name, value in text.items()})


def _devices_of_last(plan: Plan, documents: Sequence[UnitDocument]) -> dict[str, str]:
    """Return the device that measured the last checkpoint, and the last soup."""
    devices = {document.label: str(document.environment["device"]) for document in documents}
    labels = [plan.subjects[position].label for position in last_of_each_kind(plan.subjects)]
    return {label: devices[label] for label in labels if label in devices}


def environment_of(documents: Sequence[UnitDocument]) -> dict[str, Any]:
    """Return one environment of those of all units: what differs is listed or summed."""
    every = [document.environment for document in documents]
    merged = dict(every[0])
    merged["began"] = min(one["began"] for one in every)
    merged["ended"] = max(one["ended"] for one in every)
    for name in ("memory_baseline_nbytes", "memory_peak_nbytes"):
        merged[name] = max(one[name] for one in every)
    for name in [name for name in merged if name.startswith("hub_")]:  # so far, in each process
        used: dict[tuple[str, str, str], float] = {}
        for document, one in zip(documents, every, strict=True):
            process = (document.part, document.host, one["began"])
            used[process] = max(used.get(process, 0), one.get(name, 0))
        merged[name] = sum(used.values())
    merged["parts"] = len({document.part for document in documents})
    merged["hosts"] = len({document.host for document in documents})
    merged["devices"] = sorted({str(one["device"]) for one in every})
    return merged
