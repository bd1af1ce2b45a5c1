"""Items of tasks in rounds of bounded length, so that their hidden states are bounded, too.

Between blocks every stream keeps the hidden states of all its tokens. Twenty million tokens of a
7B model would be 1.5 TB for nine streams, so that items go through in rounds. The first has the
documents, and writes what schemes that calibrate make of the weights; later ones read that.

A task is cut into parts, which are batched by themselves: the losses of a part depend neither on
the round that it is in nor on the other tasks. Parts are stored as their round ends, so that a
process that is killed loses one round, and the same command measures what is left from the
weights that were quantized before. How long parts are depends on the items alone; a round of a
model without trees, which feeds the context of an item with each option, has fewer of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from qaudit.core.scheme import Calibration, Scheme
from qaudit.engine.stored_weights import Stored, Storing, is_whole, remove
from qaudit.engine.tasks import Task
from qaudit.items.kept import ItemText
from qaudit.planning.price import ROUND_TOKENS
from qaudit.types import Corpus, Item, TaskEvidence

PART_TOKENS = ROUND_TOKENS // 4
"""Of a part of a task; several of them make up a round."""


def in_parts(corpus: Corpus) -> Corpus:
    """Return a corpus whose items have the number of their part of a task."""
    items: list[Item] = []
    part, size = Counter[str](), Counter[str]()
    for item, tokens in _sizes(corpus, trees=True):
        if size[item.task] and size[item.task] + tokens > PART_TOKENS:
            part[item.task] += 1
            size[item.task] = 0
        size[item.task] += tokens
        items.append(replace(item, part=part[item.task]))
    return replace(corpus, items=tuple(items))


def in_rounds(corpus: Corpus, *, trees: bool) -> tuple[Corpus, ...]:
    """Return rounds of whole parts, by what a model with or without trees feeds.

    The first has the documents.
    """
    tokens = Counter[tuple[str, int]]()
    for item, own in _sizes(corpus, trees=trees):
        tokens[item.task, item.part] += own
    rounds: list[list[tuple[str, int]]] = [[]]
    size = 0
    for part, own in tokens.items():
        if rounds[-1] and size + own > ROUND_TOKENS:
            rounds.append([])
            size = 0
        rounds[-1].append(part)
        size += own
    corpora = [corpus.of_parts(parts) for parts in rounds]
    without = [replace(one, evaluation=(), documents=()) for one in corpora[1:]]
    return (corpora[0], *without)


def _sizes(corpus: Corpus, *, trees: bool) -> Iterator[tuple[Item, int]]:
    """Yield each item with the tokens that it feeds."""
    first = 0
    for item in corpus.items:
        windows = corpus.item_windows[first : first + item.options]
        yield item, ItemText((item,), windows).tokens(trees=trees)
        first += item.options


def joined(parts: Sequence[TaskEvidence]) -> TaskEvidence:
    """Return the items of all parts of a task, in order."""
    items, first = [], 0
    for part in parts:
        items.append(part.items + first)
        first += int(part.items.max()) + 1
    return TaskEvidence(
        parts[0].task,
        np.concatenate([part.nll for part in parts]),
        np.concatenate(items),
        np.concatenate([part.right for part in parts]),
        np.concatenate([part.greedy for part in parts]),
    )


@dataclass(frozen=True)
class StoredWeights:
    """What the schemes of a task make of the weights, in a folder between rounds."""

    folder: Path
    keys: Mapping[str, str]  # by canonical form

    def used_by(self, task: Task, *, read: bool, write: bool) -> Task:
        """Return the task with schemes that read what is stored, or write it for later rounds."""
        schemes = tuple(self._used_by(one, read=read, write=write) for one in task.schemes)
        return replace(task, schemes=schemes)

    def _used_by(self, scheme: Scheme, *, read: bool, write: bool) -> Scheme:
        if scheme.calibration is Calibration.NONE:
            return scheme
        if read and is_whole(folder := self._folder(scheme)):
            return Stored(inner=scheme, folder=folder)
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
    """Mark what the schemes of a round stored as whole."""
    for scheme in task.schemes:
        if isinstance(scheme, Storing):
            scheme.finish()
