"""Run the requested diagnostics on each subject while its weights are on disk.

A diagnostic that fails for one subject, or runs out of memory, is listed with its reason, and the
audit continues. Nothing here changes a measurement.

The checkpoint before is part of the key. If its weights could not be read when a subject was
diagnosed, the rows without them are kept, even if the weights return later. Weights that may be
evicted meanwhile are not read, so that no result depends on when they leave the disk.

Rows are stored by a key over everything that changes them: one JSON file for each subject and
diagnostic, in `evidence/diagnostics/`. The name contains the start of the key and the file all of
it, so that rows of another version, text or machine are never used. A file that cannot be read, or
was edited, counts as absent. Rows have the label under which they were first measured.

With a disk budget the weights of the checkpoint before may be evicted already: `previous` is then
None, and the part of the diagnostic that needs them is left out with a note.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qaudit.checkpoints.stamps import folder_of
from qaudit.core.course import previous_of
from qaudit.core.linears import Linears, Quantized
from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import Diagnostic, module, origin
from qaudit.engine.block_pass import Progress, open_weights
from qaudit.engine.streams import Observer
from qaudit.engine.tasks import Machine, Task
from qaudit.errors import Interrupted, QauditError, SourceError, UnreachableError, is_out_of_memory
from qaudit.model.blocks import Weights
from qaudit.saved.codec import encode, text_of
from qaudit.saved.parts import DiagnosticRows
from qaudit.saved.results import ResultStore, read_sealed, slug_of, write_sealed
from qaudit.types import Checkpoint, Corpus, Subject, Window, digest


@dataclass(frozen=True, eq=False)
class Case:
    """One subject whose weights are on disk, and how to compute with them."""

    parameters: Diagnostic
    task: Task
    machine: Machine
    previous: Checkpoint | None  # of its series, with its weights on disk
    store: ResultStore  # for evidence of the diagnostic
    progress: Progress
    confidence: float = 0.95  # of intervals
    observer: Observer | None = None  # of this subject's quantization

    @property
    def subject(self) -> Subject:
        return self.task.subject

    @property
    def corpus(self) -> Corpus:
        return self.task.corpus

    @property
    def folder(self) -> Path:
        return folder_of(self.subject.first)

    def weights(self, of: Checkpoint | None = None) -> Weights:
        """Open the weights of the subject, or of a checkpoint that is on disk."""
        subject = self.subject if of is None else Subject(of.label, ((of, 1.0),))
        allowed = self.machine.allow_pickle
        return open_weights(subject, allow_pickle=allowed, folder=self.task.folder)


@dataclass(frozen=True, eq=False)
class DocumentChoice:
    """The documents that a diagnostic uses: chosen by content, the same for every subject."""

    documents: tuple[int, ...]  # indices in the corpus
    windows: tuple[tuple[Window, ...], ...]
    sha256: str

    @classmethod
    def of(cls, corpus: Corpus, documents: int, what: str = "this") -> DocumentChoice:
        scored = {window.document for window in corpus.evaluation if window.scored}
        order = sorted(scored, key=lambda d: corpus.documents[d].sha256)[:documents]
        if len(order) < 2:
            raise SourceError(
                f"{what} needs two evaluation documents", hint="give more evaluation text"
            )
        windows = [tuple(w for w in corpus.evaluation if w.document == d) for d in order]
        hashes = [corpus.documents[d].sha256 for d in order]
        return cls(tuple(order), tuple(windows), digest(hashes))


@dataclass(frozen=True)
class Measure:
    """How a diagnostic is measured; each `measure` part defines one as `MEASURE`."""

    run: Callable[[Case], Sequence[Any]]
    """Measure one subject; returns row dataclasses, each with a `subject`."""
    watch: Callable[[Case], Observer] | None = None
    """Return the observer of a subject's quantization, called before it is measured."""


FOLDER = "diagnostics"  # in `evidence/`
Rows = list[dict[str, Any]]


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
        self.rows: defaultdict[str, DiagnosticRows] = defaultdict(DiagnosticRows)
        """The rows of each subject, and why others are missing."""
        self._confidence = confidence
        self._evicts = evicts
        self._diagnostics: dict[Diagnostic, Measure] = {
            diagnostic: module(diagnostic.name, "_measure").MEASURE for diagnostic in diagnostics
        }
        self._subjects = subjects
        self._machine = machine
        self._store = store.within(FOLDER)
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
        """Use the rows on disk, or measure; a subject may go without, for a reason."""
        label = task.subject.label
        for diagnostic, measure in self._diagnostics.items():
            if self._use(diagnostic, task):
                continue
            name = diagnostic.name
            case = self._observed.pop((label, name), None) or self._case(diagnostic, task, progress)
            try:
                rows = measure.run(case)
            except (Interrupted, UnreachableError):
                raise
            except QauditError as error:
                self.rows[label].reasons[name] = error.message
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self.rows[label].reasons[name] = "out of memory"
                continue
            key = self._key(diagnostic, task, case.previous)
            path = self._store.folder / f"{slug_of(label)}--{name}--{key[:16]}.json"
            write_sealed(path, text_of({"key": key, "rows": [encode(row) for row in rows]}))
            self._use(diagnostic, task)

    def find(self, task: Task, first: str = "") -> None:
        """Use the rows on disk, which a twin shares with its first subject, or the reason."""
        for diagnostic in self._diagnostics:
            if not self._use(diagnostic, task):
                of_first = self.rows.get(first, DiagnosticRows()).reasons
                reason = of_first.get(diagnostic.name, "its rows cannot be read")
                self.rows[task.subject.label].reasons.setdefault(diagnostic.name, reason)

    def fail(self, label: str, reason: str) -> None:
        """Record why a subject lacks all diagnostics that it has no rows of."""
        for diagnostic in self._diagnostics:
            if diagnostic.name not in self.rows[label].rows:
                self.rows[label].reasons.setdefault(diagnostic.name, reason)

    def _use(self, diagnostic: Diagnostic, task: Task) -> bool:
        rows = self._find(diagnostic, task)
        if rows is not None:
            self.rows[task.subject.label].rows[diagnostic.name] = rows
        return rows is not None

    def _find(self, diagnostic: Diagnostic, task: Task) -> Rows | None:
        """Return the rows on disk, whatever their label: better those with a checkpoint before."""
        before = self._before(diagnostic, task)
        keys = [self._key(diagnostic, task, earlier) for earlier in dict.fromkeys((before, None))]
        folder, name = self._store.folder, diagnostic.name
        for key in keys:
            for path in sorted(folder.glob(f"*--{name}--{key[:16]}.json")):
                with suppress(OSError, ValueError, KeyError, TypeError):
                    document = read_sealed(path)
                    if document["key"] == key and isinstance(document["rows"], list):
                        labels = {
                            "subject": task.subject.label,
                            "previous": None if before is None else before.label,
                            "details": path.relative_to(folder.parent.parent).as_posix(),
                        }
                        return [_renamed(row, labels) for row in document["rows"]]
        return None

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


def _renamed(row: dict[str, Any], labels: Mapping[str, str | None]) -> dict[str, Any]:
    """Return a row with the labels of today, in place of those that it was measured under."""
    return {
        name: labels[name] if name in labels and (name == "details" or value is not None) else value
        for name, value in row.items()
    }


def is_on_disk(checkpoint: Checkpoint, folder: Path) -> bool:
    """Return whether every weight file of a checkpoint is in a folder with its full size."""
    files = [(folder / file.name, file.nbytes) for file in checkpoint.files]
    return bool(files) and all(p.is_file() and p.stat().st_size == size for p, size in files)
