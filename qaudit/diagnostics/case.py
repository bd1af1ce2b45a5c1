"""The input of the measurement of a diagnostic: one subject, its weights, and rows on disk.

Rows are stored by a key over everything that changes them: one JSON file for each subject and
diagnostic, in `evidence/diagnostics/`. The name contains the start of the key and the file all of
it, so that rows of another version, text or machine are never used. A file that cannot be read, or
was edited, counts as absent. Rows have the label under which they were first measured.

With a disk budget the weights of the checkpoint before may be evicted already: `previous` is then
None, and the part of the diagnostic that needs them is left out with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qaudit.checkpoints.stamps import folder_of
from qaudit.diagnostics.diagnostic import Diagnostic
from qaudit.engine.block_pass import Progress, open_weights
from qaudit.engine.streams import Observer
from qaudit.engine.tasks import Machine, Task
from qaudit.errors import SourceError
from qaudit.model.blocks import Weights
from qaudit.saved.results import ResultStore, read_sealed
from qaudit.types import Checkpoint, Corpus, Subject, Window, digest

FOLDER = "diagnostics"  # in `evidence/`
Rows = list[dict[str, Any]]


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

    def weights(self) -> Weights:
        return self._open(self.subject)

    def previous_weights(self) -> Weights | None:
        """Open the weights of the checkpoint before, if they are on disk."""
        if self.previous is None:
            return None
        return self._open(Subject(self.previous.label, ((self.previous, 1.0),)))

    def _open(self, subject: Subject) -> Weights:
        return open_weights(
            subject, allow_pickle=self.machine.allow_pickle, folder=self.task.folder
        )


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


def is_on_disk(checkpoint: Checkpoint, folder: Path) -> bool:
    """Return whether every weight file of a checkpoint is in a folder with its full size."""
    files = [(folder / file.name, file.nbytes) for file in checkpoint.files]
    return bool(files) and all(p.is_file() and p.stat().st_size == size for p, size in files)


def find_rows(folder: Path, name: str, keys: Sequence[str]) -> tuple[Path, Rows] | None:
    """Return the rows under the first of the keys that has any, whatever their label."""
    for key in keys:
        for path in sorted(folder.glob(f"*--{name}--{key[:16]}.json")):
            try:
                document = read_sealed(path)
                if document["key"] == key and isinstance(rows := document["rows"], list):
                    return path, rows
            except (OSError, ValueError, KeyError, TypeError):
                continue
    return None
