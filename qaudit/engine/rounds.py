"""Items of tasks in rounds of bounded length, so that their hidden states are bounded, too.

Between blocks every stream keeps the hidden states of all its tokens. Twenty million tokens of a
7B model would be 1.5 TB for nine streams, so that items go through in rounds. The first has the
documents, and writes what schemes that calibrate make of the weights; later ones read that.

A task is cut into parts, which are batched by themselves: the losses of a part depend neither on
the round that it is in nor on the other tasks. Parts are stored as their round ends, so that a
process that is killed loses one round, and the same command measures what is left from the
weights that were quantized before. How long parts are depends on the items alone; a round of a
model without trees, which feeds the context of an item with each option, has fewer of them.

On disk a task of one part is stored as it is. Of a longer one each part has a file in `parts/`
beside it, which is removed when the task is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from qaudit.core.scheme import Calibration, Scheme
from qaudit.engine.stored_weights import Restoring, Storing, is_whole, remove
from qaudit.engine.tasks import StoredResults, Task, place_of, short_of
from qaudit.items.tokens import ItemText
from qaudit.planning.price import ROUND_TOKENS
from qaudit.saved.results import Filed, ResultStore
from qaudit.types import Corpus, Evidence, Item, Measurement, TaskEvidence, digest

PARTS = "parts"
"""The folder, within that of a task, for parts of it."""

Part = tuple[str, int]
"""A task and the number of its part."""

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
    """Return rounds of whole parts, by what a model with or without trees feeds."""
    tokens = Counter[Part]()
    for item, own in _sizes(corpus, trees=trees):
        tokens[item.task, item.part] += own
    rounds: list[list[Part]] = [[]]
    size = 0
    for part, own in tokens.items():
        if rounds[-1] and size + own > ROUND_TOKENS:
            rounds.append([])
            size = 0
        rounds[-1].append(part)
        size += own
    corpora = [corpus.of_parts(parts) for parts in rounds]
    without = [part.without_evaluation() for part in corpora[1:]]
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


class TaskParts:
    """What is on disk of the tasks that a pass lacks."""

    def __init__(self, task: Task, there: StoredResults, folder: ResultStore) -> None:
        self._task, self._there, self._folder = task, there, folder
        self._count = Counter(name for name, _ in task.corpus.parts)
        self._filed: dict[str, dict[Part, Filed]] = {}
        for spec, scheme in task.streams.items():
            lacking = set(there.missing_tasks(spec))
            found = {
                part: self._place(part).find(
                    task.subject.label, short_of(scheme), self._key(spec, part)
                )
                for part in task.corpus.parts
                if part[0] in lacking and self._count[part[0]] > 1
            }
            self._filed[spec] = {part: filed for part, filed in found.items() if filed is not None}

    def missing(self, spec: str) -> tuple[Part, ...]:
        lacking = set(self._there.missing_tasks(spec))
        return tuple(
            part
            for part in self._task.corpus.parts
            if part[0] in lacking and part not in self._filed[spec]
        )

    def write(self, spec: str, part: Part, measurement: Measurement, one: TaskEvidence) -> None:
        identity = self._there.task_identities[spec][part[0]]
        whole = identity if self._count[part[0]] == 1 else None
        filed = self._place(part).write(_alone(measurement, one), self._key(spec, part), whole)
        self._filed[spec][part] = filed

    def whole(self, spec: str) -> Mapping[str, Filed]:
        """Return the tasks of a stream all of whose parts are there, each in one file."""
        return dict(self._whole(spec))

    def _whole(self, spec: str) -> Iterator[tuple[str, Filed]]:
        for name in self._there.missing_tasks(spec):
            parts = [filed for part, filed in sorted(self._filed[spec].items()) if part[0] == name]
            if len(parts) < self._count[name]:
                continue
            if len(parts) == 1:
                yield name, parts[0]
                continue
            measurements = [result.measurement for result in parts]
            seconds = sum(measurement.seconds for measurement in measurements)
            evidence = joined([measurement.evidence.tasks[0] for measurement in measurements])
            measurement = replace(_alone(measurements[0], evidence), seconds=seconds)
            identity = self._there.task_identities[spec][name]
            yield name, place_of(self._folder, name).write(measurement, identity.key, identity)
            for result in parts:
                result.path.unlink(missing_ok=True)

    def _place(self, part: Part) -> ResultStore:
        place = place_of(self._folder, part[0])
        return place if self._count[part[0]] == 1 else place.within(PARTS)

    def _key(self, spec: str, part: Part) -> str:
        key, count = self._there.task_identities[spec][part[0]].key, self._count[part[0]]
        return key if count == 1 else digest([key, part[1], count])


def _alone(measurement: Measurement, one: TaskEvidence) -> Measurement:
    evidence = Evidence((), np.zeros(0), *(np.zeros(0, np.int64),) * 2, (), tasks=(one,))
    return replace(measurement, evidence=evidence)
