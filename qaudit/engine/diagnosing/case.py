"""What a diagnostic is given of one subject, and what it gives back.

The weights of the checkpoint before come from wherever they lie. On the Hub's side of a disk
budget they may be gone by then, or go while they are read: `previous` is then None, and what
needs them is left out and said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qaudit.checkpoints.places import folder_of
from qaudit.core.diagnostic import Diagnostic
from qaudit.engine.block_pass import Observer, Progress
from qaudit.engine.measure import open_weights
from qaudit.engine.tasks import Machine, Task
from qaudit.model.blocks import Weights
from qaudit.saved.results import ResultStore
from qaudit.types import Checkpoint, Corpus, Subject


@dataclass(frozen=True, eq=False)
class Case:
    """One subject whose weights are there, and how to compute with them."""

    asked: Diagnostic  # with its parameters
    task: Task
    machine: Machine
    previous: Checkpoint | None  # of its series, with its weights at hand
    store: ResultStore  # where evidence of its own goes
    progress: Progress
    confidence: float = 0.95  # of intervals
    watched: Observer | None = None  # what looked on while this subject was measured

    @property
    def subject(self) -> Subject:
        """The subject."""
        return self.task.subject

    @property
    def corpus(self) -> Corpus:
        """The text: calibration and evaluation windows."""
        return self.task.corpus

    @property
    def folder(self) -> Path:
        """Where the configuration lies that makes weights a model."""
        return folder_of(self.subject.first)

    def weights(self) -> Weights:
        """Open the weights; a soup's are merged as they are read."""
        return self.task.merged or self._open(self.subject)

    def previous_weights(self) -> Weights | None:
        """Open the weights of the checkpoint before, if they are at hand."""
        if self.previous is None:
            return None
        return self._open(Subject(self.previous.label, ((self.previous, 1.0),)))

    def _open(self, subject: Subject) -> Weights:
        return open_weights(
            subject, allow_pickle=self.machine.allow_pickle, folder=self.task.folder
        )


@dataclass(frozen=True, eq=False)
class Found:
    """What a diagnostic found: dataclasses of `types/diagnosed.py`, each with a `subject`."""

    rows: Sequence[object]


def previous_of(subject: Subject, subjects: Sequence[Subject]) -> Checkpoint | None:
    """Return the checkpoint before a checkpoint: of its own branch, or of what that forked from.

    A soup has none. Only what the audit measures is looked at, in the order of the series.
    """
    if subject.merge is not None:
        return None
    own, before = subject.first, list[Checkpoint]()
    for one in subjects:
        if one.label == subject.label:
            break
        if one.merge is None and _series(one.first) == _series(own):
            before.append(one.first)
    branch = [c for c in before if (c.stage, c.ingredient) == (own.stage, own.ingredient)]
    trunk = [c for c in before if c.ingredient is None]
    return next(iter(reversed(branch or trunk)), None)


def _series(checkpoint: Checkpoint) -> str:
    """Return what checkpoints of one series share: a repository, or the folder they lie in."""
    location = checkpoint.ref.location
    return location if checkpoint.commit else str(Path(location).parent)


def is_at_hand(checkpoint: Checkpoint, folder: Path) -> bool:
    """Say whether every file of a checkpoint's weights lies in a folder, whole."""
    files = [(folder / file.name, file.nbytes) for file in checkpoint.files]
    return bool(files) and all(p.is_file() and p.stat().st_size == size for p, size in files)
