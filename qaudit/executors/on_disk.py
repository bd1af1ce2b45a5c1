"""What parts have measured, read back as the events of an executor. No torch, no weights.

Records and evidence on disk are the truth: which process wrote them, when and where changes
nothing. What is missing is named, and its round is written for the next parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qaudit.core.merges.mean import Mean
from qaudit.diagnostics.registry import parse_diagnostics
from qaudit.errors import MissingParts, SourceError
from qaudit.executors.events import RETRY_TASK, Compared, Ended, Event, Failed, Measured, Started
from qaudit.judge.released import WeightDifference
from qaudit.saved.diagnosed import tables_of
from qaudit.saved.documents import ResultDocument, UnitDocument
from qaudit.saved.parts import FIRST, read_round, read_unit, write_round
from qaudit.saved.results import Filed, read_measurement, with_tasks
from qaudit.search.result import SearchResult
from qaudit.types import Pass, Plan, Run, Subject, WorkUnit, units_of


class Due(MissingParts):
    """A round of which units are missing."""

    def __init__(self, number: int, missing: Sequence[WorkUnit], of: int) -> None:
        self.round, self.missing = number, tuple(missing)
        names = ", ".join(f"`{unit.label}`" for unit in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        subjects, are = "subject" + "s" * (of != 1), "is" if len(missing) == 1 else "are"
        what = f"round {number} has {of} {subjects}, and {len(missing)} {are} not measured yet"
        super().__init__(f"{what}: {names}{more}")


class OnDisk:
    """The executor that measures nothing: it reads what parts have measured."""

    def __init__(self, run: Run, out: Path) -> None:
        self.run, self.out = run, out
        self._round = FIRST - 1

    def execute(self, plan: Plan, passes: Sequence[Pass]) -> Iterator[Event]:
        """Yield the events of passes in their order; searches are a round of their own."""
        documents: dict[str, UnitDocument] = {}
        for some in filter(None, rounds_of(passes)):
            self._round += 1
            documents |= self._documents(some)
        ordered = [documents[unit.label] for unit in units_of(passes)]
        yield Started(ordered[0].protocol)
        for task, reason in ordered[0].failed_tasks.items():
            yield Failed(f"task {task}", SourceError(reason, hint=RETRY_TASK))
        for unit, document in zip(units_of(passes), ordered, strict=True):
            yield self._event(unit.subject, document)
        yield Ended(environment_of(ordered), self._diagnostics(plan, documents))

    def _documents(self, passes: Sequence[Pass]) -> dict[str, UnitDocument]:
        if self._round > FIRST:
            write_round(self._round, passes, self.run, self.out)
        units = units_of(passes)
        self.await_units(self._round, units)
        found = {unit.label: read_unit(self.run, unit, self.out) for unit in units}
        missing = [u for u in units if not self.is_whole(found[u.label])]
        if missing:
            raise Due(self._round, missing, len(units))
        return {label: document for label, document in found.items() if document}

    def await_units(self, number: int, units: Sequence[WorkUnit]) -> None:
        """Have units measured, where an executor can: here they are there or missing."""

    def is_whole(self, document: UnitDocument | None) -> bool:
        """Return whether a unit's evidence is there as it was written."""
        if document is None:
            return False
        try:
            for result in document.results:
                self._filed(document.label, result)
        except (OSError, ValueError):
            return False
        return True

    def _event(self, subject: Subject, document: UnitDocument) -> Event:
        label = subject.label
        if document.error is not None:
            return Failed(label, SourceError(document.error.message, hint=document.error.hint))
        if document.difference is not None:
            return Compared(subject, difference_of(document.difference))
        results = [(one.perturbed, self._filed(label, one)) for one in document.results]
        plain = tuple(filed for perturbed, filed in results if perturbed is None)
        search = None
        if document.search is not None:
            soup = _soup(subject, document.search.members)
            search = SearchResult(soup, plain, document.search, document.findings)
        return Measured(
            label, plain, tuple((p, filed) for p, filed in results if p is not None), search
        )

    def _filed(self, label: str, result: ResultDocument) -> Filed:
        path = self.out / result.evidence
        measurement = read_measurement(path, result.sha256)
        filed = Filed(replace(measurement, subject=label, scheme=result.scheme), path)
        tasks = (self.out / one.evidence for one in result.tasks)
        parts = [
            Filed(read_measurement(path, one.sha256), path)
            for path, one in zip(tasks, result.tasks, strict=True)
        ]
        return with_tasks(filed, parts)

    def _diagnostics(self, plan: Plan, documents: Mapping[str, UnitDocument]) -> Any:
        measured = [s for s in plan.subjects if s.label in documents]
        labels = [s.label for s in measured if documents[s.label].error is None]
        rows = {label: document.diagnostics for label, document in documents.items()}
        return tables_of(parse_diagnostics(plan.recipe.diagnostics), rows, labels, measured)


def rounds_of(passes: Sequence[Pass]) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """Return the passes that need nothing, and searches: these look up the results of others."""
    return (
        tuple(one for one in passes if not one.subject.is_search),
        tuple(one for one in passes if one.subject.is_search),
    )


@dataclass(frozen=True)
class RoundState:
    """A round that is due: its units, and those that are not measured."""

    number: int
    units: tuple[WorkUnit, ...]
    missing: tuple[WorkUnit, ...]
    failed: tuple[WorkUnit, ...]


def state_of(run: Run, out: Path, number: int) -> RoundState:
    """Return how far a round is."""
    passes = read_round(run, out, number)
    if number == FIRST:  # searches are due when the others are measured
        passes = next(filter(None, rounds_of(passes)), ())
    units = units_of(passes)
    reader = OnDisk(run, out)
    documents = {unit.label: read_unit(run, unit, out) for unit in units}
    return RoundState(
        number,
        units,
        tuple(unit for unit in units if not reader.is_whole(documents[unit.label])),
        tuple(u for u in units if (one := documents[u.label]) is not None and one.error),
    )


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


def environment_of(documents: Sequence[UnitDocument]) -> dict[str, Any]:
    """Return one environment of those of all units: what differs is listed or summed."""
    every = [document.environment for document in documents]
    merged = dict(every[0])
    merged["began"] = min(one["began"] for one in every)
    merged["ended"] = max(one["ended"] for one in every)
    for name in ("memory_baseline_nbytes", "memory_peak_nbytes"):
        merged[name] = max(one[name] for one in every)
    for name in ("hub_calls", "hub_requests", "hub_nbytes_fetched", "hub_nbytes_verified"):
        if any(name in one for one in every):
            merged[name] = sum(one.get(name, 0) for one in every)
    merged["parts"] = len({document.part for document in documents})
    merged["hosts"] = len({document.host for document in documents})
    merged["devices"] = sorted({str(one["device"]) for one in every})
    return merged
