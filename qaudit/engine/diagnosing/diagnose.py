"""Diagnose subject after subject, each while its weights are there.

For each subject one function is called per diagnostic that was asked for. What was found before
is taken from the disk, by its content; what fails for one subject, or has no memory there, is
noted with its reason and the audit goes on. Nothing here touches a measurement.

The checkpoint before is part of a key. Where its weights were gone when a subject was
diagnosed, what was found without them is kept as such and stands: a diagnosis is not made
again because a file came back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from qaudit.core.diagnostic import Diagnostic
from qaudit.core.diagnostics.plane import Plane
from qaudit.core.diagnostics.sensitivity import Sensitivity
from qaudit.core.scheme import Linears, Quantized, Scheme
from qaudit.engine.block_pass import Observer, Progress
from qaudit.engine.diagnosing import kept
from qaudit.engine.diagnosing.case import Case, Found, is_at_hand, previous_of
from qaudit.engine.diagnosing.curvature import measure_curvature
from qaudit.engine.diagnosing.plane import measure_plane
from qaudit.engine.diagnosing.sensitivity import measure_sensitivity
from qaudit.engine.diagnosing.weights import (
    WeightWatch,
    measure_weights,
    with_drift,
    without_tensors,
)
from qaudit.engine.tasks import Machine, Task
from qaudit.errors import Interrupted, QauditError, UnreachableError
from qaudit.model.allocator import is_out_of_memory
from qaudit.planning.curved import plane_scheme
from qaudit.planning.diagnoses import sensitive_scheme
from qaudit.saved.results import ResultStore
from qaudit.saved.rows import row_of
from qaudit.types import Checkpoint, NotDiagnosed, digest


@dataclass(frozen=True)
class Kind:
    """How a diagnostic is made, and what of an audit changes it."""

    measure: Callable[[Case], Found]
    schemes: Callable[[Diagnostic, Sequence[Scheme]], Sequence[Scheme]] = lambda asked, schemes: ()
    previous: bool = False  # whether the checkpoint before changes it
    watch: Callable[[Case], Observer] | None = None  # what looks on while a subject is measured


def _all(_: Diagnostic, schemes: Sequence[Scheme]) -> Sequence[Scheme]:
    return schemes


def _sensitive(asked: Diagnostic, schemes: Sequence[Scheme]) -> Sequence[Scheme]:
    return [sensitive_scheme(cast(Sensitivity, asked), schemes)]


def _towards(asked: Diagnostic, schemes: Sequence[Scheme]) -> Sequence[Scheme]:
    return [plane_scheme(cast(Plane, asked), schemes)]


KINDS: Mapping[str, Kind] = {
    "curvature": Kind(measure_curvature),
    "weights": Kind(measure_weights, schemes=_all, previous=True, watch=WeightWatch),
    "sensitivity": Kind(measure_sensitivity, schemes=_sensitive),
    "plane": Kind(measure_plane, schemes=_towards, previous=True),
}
"""By the name of the diagnostic; each in a module of its own beside this one."""


class Diagnoses:
    """What is known of all subjects under the diagnostics that were asked for."""

    def __init__(
        self,
        asked: Sequence[Diagnostic],
        tasks: Sequence[Task],
        machine: Machine,
        store: ResultStore,
        confidence: float = 0.95,
    ) -> None:
        """Know nothing yet."""
        self._confidence = confidence
        self._asked = tuple(asked)
        self._subjects = [task.subject for task in tasks]
        self._machine = machine
        self._store = store.within(kept.FOLDER)
        self._rows: dict[tuple[str, str], kept.Rows] = {}
        self._reasons: dict[tuple[str, str], str] = {}
        self._watching: dict[tuple[str, str], Case] = {}

    def lacks(self, task: Task) -> bool:
        """Say whether a subject's weights are needed to diagnose it."""
        return any(self._find(one, task) is None for one in self._asked)

    def watch(self, task: Task, progress: Progress) -> Observer | None:
        """Return who looks on while a subject is measured, if anyone wants to."""
        looking: dict[str, Observer] = {}
        for one in self._asked:
            watch = KINDS[one.name].watch
            if watch is not None and self._find(one, task) is None:
                case = self._case(one, task, progress)
                looking[one.name] = look = watch(case)
                self._watching[task.subject.label, one.name] = replace(case, watched=look)

        def shown(scheme: Scheme, linears: Linears, quantized: Quantized) -> None:
            for name, look in tuple(looking.items()):
                try:
                    look(scheme, linears, quantized)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    # Measuring goes on; what was seen is not whole, and is tried again by itself.
                    del looking[name], self._watching[task.subject.label, name]

        return shown if looking else None

    def take(self, task: Task, progress: Progress) -> None:
        """Diagnose a subject whose weights are there."""
        for one in self._asked:
            rows = self._find(one, task)
            if rows is None:
                rows = self._measured(one, task, progress)
            if rows is not None:
                self._rows[task.subject.label, one.name] = rows

    def find(self, task: Task) -> None:
        """Take what is on the disk for a subject, or for one that has the same weights."""
        for one in self._asked:
            rows = self._find(one, task)
            if rows is not None:
                self._rows[task.subject.label, one.name] = rows
            else:
                self.fail(task.subject.label, "its weights were not at hand", one.name)

    def fail(self, label: str, reason: str, name: str = "") -> None:
        """Note why a subject goes without a diagnostic, or without all of them."""
        for one in self._asked:
            if one.name == name or (not name and (label, one.name) not in self._rows):
                self._reasons.setdefault((label, one.name), reason)

    def tables(self, labels: Sequence[str]) -> dict[str, Any]:
        """Return all rows by diagnostic, in the order of the labels, and what is missing."""
        tables: dict[str, Any] = {
            one.name: [row for label in labels for row in self._rows.get((label, one.name), ())]
            for one in self._asked
        }
        if "weights" in tables:
            tables["weights"] = with_drift(without_tensors(tables["weights"]), self._before())
        tables["skipped"] = [row_of(one) for one in self._skipped(labels)]
        return {name: rows for name, rows in tables.items() if rows}

    def _before(self) -> dict[str, str]:
        found = {one.label: previous_of(one, self._subjects) for one in self._subjects}
        return {label: before.label for label, before in found.items() if before is not None}

    def _skipped(self, labels: Sequence[str]) -> Iterator[NotDiagnosed]:
        for label in labels:
            for one in self._asked:
                if (label, one.name) in self._reasons and (label, one.name) not in self._rows:
                    yield NotDiagnosed(label, one.name, self._reasons[label, one.name])

    # ------------------------------------------------------------------- one of one subject

    def _measured(self, asked: Diagnostic, task: Task, progress: Progress) -> kept.Rows | None:
        """Measure what is not on the disk; note the reason where that cannot be done."""
        label = task.subject.label
        watched = self._watching.pop((label, asked.name), None)
        case = watched or self._case(asked, task, progress)
        try:
            found = KINDS[asked.name].measure(case)
        except (Interrupted, UnreachableError):
            raise
        except QauditError as error:
            self._reasons[label, asked.name] = error.message
            return None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._reasons[label, asked.name] = "out of memory"
            return None
        key = self._key(asked, task, case.previous)
        path = kept.path_of(self._store.folder, label, asked.name, key)
        kept.keep(path, key, [row_of(row) for row in found.rows])
        return self._find(asked, task)

    def _find(self, asked: Diagnostic, task: Task) -> kept.Rows | None:
        """Return what is on the disk, under this subject's label and that of the one before."""
        before = previous_of(task.subject, self._subjects) if KINDS[asked.name].previous else None
        keys = [self._key(asked, task, one) for one in dict.fromkeys((before, None))]
        found = kept.find(self._store.folder, asked.name, keys)
        if found is None:
            return None
        here = {
            "subject": task.subject.label,
            "previous": None if before is None else before.label,
            "details": found.path.relative_to(self._store.folder.parent.parent).as_posix(),
        }
        return [_renamed(row, here) for row in found.rows]

    def _case(self, asked: Diagnostic, task: Task, progress: Progress) -> Case:
        task = replace(task, further=(), shows_floor=False)
        previous = self._previous(asked, task)
        return Case(
            asked=asked,
            task=task,
            machine=self._machine,
            previous=previous,
            store=self._store,
            progress=_named(asked, progress),
            confidence=self._confidence,
        )

    def _previous(self, asked: Diagnostic, task: Task) -> Checkpoint | None:
        """Return the checkpoint before, if it counts and its weights are there."""
        if not KINDS[asked.name].previous:
            return None
        before = previous_of(task.subject, self._subjects)
        if before is None or not is_at_hand(before, task.folder(before)):
            return None
        return before

    def _key(self, asked: Diagnostic, task: Task, previous: Checkpoint | None) -> str:
        """Identify everything that changes what is found."""
        identity = task.identity(None, self._machine)
        schemes = KINDS[asked.name].schemes(asked, task.schemes)
        return digest({
            **vars(identity),
            "diagnostic": asked.spec,
            "version": asked.version,
            "schemes": [(scheme.spec, scheme.version) for scheme in schemes],
            "previous": None if previous is None else previous.content,
            "confidence": self._confidence,
        })  # fmt: skip


def _renamed(row: dict[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the names that it has in this audit; what it does not name stays so."""
    other = {k: v for k, v in here.items() if k == "details" or row.get(k) is not None}
    return {**row, **{k: v for k, v in other.items() if k in row}}


def _named(asked: Diagnostic, progress: Progress) -> Progress:
    return lambda done, total, what: progress(done, total, f"{asked.name}, {what}")
