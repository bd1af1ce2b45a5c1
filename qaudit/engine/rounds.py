"""Items of tasks in rounds, so that their hidden states do not grow with the number of tasks.

Between blocks every stream keeps the hidden states of all its tokens. Twenty million tokens of a
7B model would be 1.5 TB for nine streams, so that tasks go through in rounds, each of whole tasks.
The first has the documents, and writes what schemes that calibrate make of the weights; later ones
read that. Tasks are batched by themselves, so that losses do not depend on the tasks beside them,
and stored as their round ends: a process that is killed loses one round.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from qaudit.core.scheme import Calibration, Scheme
from qaudit.engine.stored_weights import Restoring, Storing, is_whole, remove
from qaudit.engine.tasks import Task
from qaudit.items.tokens import ItemText
from qaudit.planning.price import ROUND_TOKENS
from qaudit.types import Corpus


def in_rounds(corpus: Corpus, *, trees: bool) -> tuple[Corpus, ...]:
    """Return rounds of whole tasks, by what a model with or without trees feeds."""
    tokens = ItemText(corpus.items, corpus.item_windows).task_tokens(trees=trees)
    rounds: list[list[str]] = [[]]
    size = 0
    for name, own in tokens.items():
        if rounds[-1] and size + own > ROUND_TOKENS:
            rounds.append([])
            size = 0
        rounds[-1].append(name)
        size += own
    corpora = [corpus.of_tasks(names) for names in rounds]
    return (corpora[0], *(each.without_evaluation() for each in corpora[1:]))


@dataclass(frozen=True)
class StoredWeights:
    """What the schemes of a task make of the weights, in a folder between rounds."""

    folder: Path
    keys: Mapping[str, str]  # by canonical form

    def used_by(self, task: Task, *, read: bool, write: bool) -> Task:
        """Return the task with schemes that read what is stored, or write it for later rounds."""
        schemes = tuple(self._used_by(scheme, read=read, write=write) for scheme in task.schemes)
        return replace(task, schemes=schemes)

    def _used_by(self, scheme: Scheme, *, read: bool, write: bool) -> Scheme:
        if scheme.calibration is Calibration.NONE:
            return scheme
        if read and is_whole(folder := self._folder(scheme)):
            return Restoring(inner=scheme, folder=folder)
        return Storing(inner=scheme, folder=self._folder(scheme)) if write else scheme

    def _folder(self, scheme: Scheme) -> Path:
        return self.folder / self.keys[scheme.spec][:32]

    def remove(self, task: Task) -> None:
        """Remove what the schemes of a task stored."""
        for scheme in task.schemes:
            remove(self._folder(scheme))
        with suppress(OSError):  # other processes may store theirs
            self.folder.rmdir()


def finish(task: Task) -> None:
    for scheme in task.schemes:
        if isinstance(scheme, Storing):
            scheme.finish()
