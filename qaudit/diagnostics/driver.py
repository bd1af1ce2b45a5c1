"""Run the requested diagnostics on each subject while its weights are on disk.

Rows on disk are used again if their key matches. A diagnostic that fails for one subject, or runs
out of memory, is listed with its reason, and the audit continues. Nothing here changes a
measurement.

The checkpoint before is part of the key. If its weights could not be read when a subject was
diagnosed, the rows without them are kept, even if the weights return later. Weights that may be
evicted meanwhile are not read, so that no result depends on when they leave the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qaudit.core.course import previous_of
from qaudit.core.linears import Linears, Quantized
from qaudit.core.scheme import Scheme
from qaudit.diagnostics import registry
from qaudit.diagnostics.case import FOLDER, Case, Measure, Rows, find_rows, is_on_disk
from qaudit.diagnostics.diagnostic import Diagnostic
from qaudit.diagnostics.registry import origin
from qaudit.engine.block_pass import Progress
from qaudit.engine.streams import Observer
from qaudit.engine.tasks import Machine, Task
from qaudit.errors import Interrupted, QauditError, UnreachableError, is_out_of_memory
from qaudit.saved.codec import encode, text_of
from qaudit.saved.parts import DiagnosticRows
from qaudit.saved.results import ResultStore, slug_of, write_sealed
from qaudit.types import Checkpoint, Subject, digest


class Diagnoses:
    """The requested diagnostics of all subjects."""

    def __init__(
        self,
        diagnostics: Sequence[Diagnostic],
        subjects: Sequence[Subject],
        machine: Machine,
        store: ResultStore,
        confidence: float = 0.95,
        *,
        evicts: bool = False,
    ) -> None:
        """Diagnose subjects of a series; `evicts`: the checkpoint before may leave the disk."""
        self._confidence = confidence
        self._evicts = evicts
        self._diagnostics: dict[Diagnostic, Measure] = {
            diagnostic: registry.measure(diagnostic.name).MEASURE for diagnostic in diagnostics
        }
        self._subjects = subjects
        self._machine = machine
        self._store = store.within(FOLDER)
        self._rows: dict[tuple[str, str], Rows] = {}
        self._reasons: dict[tuple[str, str], str] = {}
        self._observed: dict[tuple[str, str], Case] = {}

    def lacks(self, task: Task) -> bool:
        return any(self._find(diagnostic, task) is None for diagnostic in self._diagnostics)

    def watch(self, task: Task, progress: Progress) -> Observer | None:
        observers: dict[str, Observer] = {}
        for diagnostic, measure in self._diagnostics.items():
            if measure.watch is not None and self._find(diagnostic, task) is None:
                case = self._case(diagnostic, task, progress)
                observers[diagnostic.name] = observer = measure.watch(case)
                self._observed[task.subject.label, diagnostic.name] = replace(
                    case, observer=observer
                )

        def observe(scheme: Scheme, linears: Linears, quantized: Quantized) -> None:
            for name, observer in tuple(observers.items()):
                try:
                    observer(scheme, linears, quantized)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    # The measurement continues; the diagnostic starts again without an observer.
                    del observers[name], self._observed[task.subject.label, name]

        return observe if observers else None

    def take(self, task: Task, progress: Progress) -> None:
        for diagnostic, measure in self._diagnostics.items():
            rows = self._find(diagnostic, task)
            if rows is None:
                rows = self._measured(diagnostic, measure, task, progress)
            if rows is not None:
                self._rows[task.subject.label, diagnostic.name] = rows

    def find(self, task: Task, first: str = "") -> None:
        """Use the rows on disk, which a twin shares with its first subject, or the reason."""
        for diagnostic in self._diagnostics:
            rows = self._find(diagnostic, task)
            if rows is not None:
                self._rows[task.subject.label, diagnostic.name] = rows
            else:
                reason = self._reasons.get((first, diagnostic.name), "its rows cannot be read")
                self.fail(task.subject.label, reason, diagnostic.name)

    def fail(self, label: str, reason: str, name: str = "") -> None:
        """Record why a subject lacks one diagnostic, or all that it has no rows of."""
        for diagnostic in self._diagnostics:
            if diagnostic.name == name or (not name and (label, diagnostic.name) not in self._rows):
                self._reasons.setdefault((label, diagnostic.name), reason)

    @property
    def rows(self) -> dict[str, DiagnosticRows]:
        """The rows of each subject, and why others are missing."""
        keys = [*self._rows, *self._reasons]
        return {
            label: DiagnosticRows(
                {name: rows for (subject, name), rows in self._rows.items() if subject == label},
                {name: why for (subject, name), why in self._reasons.items() if subject == label},
            )
            for label in dict.fromkeys(label for label, _ in keys)
        }

    def _measured(
        self, diagnostic: Diagnostic, measure: Measure, task: Task, progress: Progress
    ) -> Rows | None:
        label, name = task.subject.label, diagnostic.name
        case = self._observed.pop((label, name), None) or self._case(diagnostic, task, progress)
        try:
            rows = measure.run(case)
        except (Interrupted, UnreachableError):
            raise
        except QauditError as error:
            self._reasons[label, name] = error.message
            return None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._reasons[label, name] = "out of memory"
            return None
        key = self._key(diagnostic, task, case.previous)
        path = self._store.folder / f"{slug_of(label)}--{name}--{key[:16]}.json"
        write_sealed(path, text_of({"key": key, "rows": [encode(row) for row in rows]}))
        return self._find(diagnostic, task)

    def _find(self, diagnostic: Diagnostic, task: Task) -> Rows | None:
        before = self._before(diagnostic, task)
        keys = [self._key(diagnostic, task, earlier) for earlier in dict.fromkeys((before, None))]
        stored = find_rows(self._store.folder, diagnostic.name, keys)
        if stored is None:
            return None
        path, rows = stored
        labels = {
            "subject": task.subject.label,
            "previous": None if before is None else before.label,
            "details": path.relative_to(self._store.folder.parent.parent).as_posix(),
        }
        return [
            {
                name: labels[name]
                if name in labels and (name == "details" or value is not None)
                else value
                for name, value in row.items()
            }
            for row in rows
        ]

    def _case(self, diagnostic: Diagnostic, task: Task, progress: Progress) -> Case:
        """Return the input of one diagnostic; weights of before are there if they stay there."""
        previous = self._before(diagnostic, task)
        is_there = (
            previous is not None
            and not (self._evicts and previous.commit is not None)
            and is_on_disk(previous, task.folder(previous))
        )

        def named(done: int, total: int, what: str) -> None:
            progress(done, total, f"{diagnostic.name}, {what}")

        return Case(
            parameters=diagnostic,
            task=task,
            machine=self._machine,
            previous=previous if is_there else None,
            store=self._store,
            progress=named,
            confidence=self._confidence,
        )

    def _before(self, diagnostic: Diagnostic, task: Task) -> Checkpoint | None:
        return previous_of(task.subject, self._subjects) if diagnostic.reads_previous else None

    def _key(self, diagnostic: Diagnostic, task: Task, previous: Checkpoint | None) -> str:
        return digest({
            **vars(task.identity(None, self._machine)),
            "diagnostic": diagnostic.spec,
            "version": diagnostic.version,
            "schemes": [(s.spec, s.version) for s in diagnostic.schemes(task.schemes)],
            "previous": None if previous is None else previous.content,
            "confidence": self._confidence,
            **({"experts": text} if (text := self._machine.experts.text) else {}),
            **({} if (plugin := origin(diagnostic.name)) is None else {"plugin": str(plugin)}),
        })  # fmt: skip
