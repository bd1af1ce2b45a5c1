"""The parts of tasks on disk, and the tasks that they make up once all are there.

A task of one part is stored as it is. Of a longer one each part has a file in `parts/` beside it,
which is removed when the task is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from qaudit.engine.rounds import joined
from qaudit.engine.tasks import Stored, Task, place_of, short_of
from qaudit.saved.results import Filed, ResultStore
from qaudit.types import Evidence, Measurement, TaskEvidence, digest

PARTS = "parts"
"""The folder, within that of a task, for parts of it."""

Part = tuple[str, int]
"""A task and the number of its part."""


class TaskParts:
    """What is on disk of the tasks that a pass lacks."""

    def __init__(self, task: Task, there: Stored, folder: ResultStore) -> None:
        """Look up every part of a task whose corpus is cut into parts."""
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
            self._filed[spec] = {part: one for part, one in found.items() if one is not None}

    def missing(self, spec: str) -> tuple[Part, ...]:
        """Return the parts that a stream was not measured on."""
        lacking = set(self._there.missing_tasks(spec))
        return tuple(
            part
            for part in self._task.corpus.parts
            if part[0] in lacking and part not in self._filed[spec]
        )

    def write(self, spec: str, part: Part, measurement: Measurement, one: TaskEvidence) -> None:
        """Store a part of a stream's measurement."""
        filed = self._place(part).write(_alone(measurement, one), self._key(spec, part))
        self._filed[spec][part] = filed

    def whole(self, spec: str) -> Mapping[str, Filed]:
        """Return the tasks of a stream all of whose parts are there, each in one file."""
        return dict(self._whole(spec))

    def _whole(self, spec: str) -> Iterator[tuple[str, Filed]]:
        for name in self._there.missing_tasks(spec):
            parts = [one for part, one in sorted(self._filed[spec].items()) if part[0] == name]
            if len(parts) < self._count[name]:
                continue
            if len(parts) == 1:
                yield name, parts[0]
                continue
            measurements = [one.measurement for one in parts]
            seconds = sum(one.seconds for one in measurements)
            evidence = joined([one.evidence.tasks[0] for one in measurements])
            measurement = replace(_alone(measurements[0], evidence), seconds=seconds)
            key = self._there.task_keys[spec][name]
            yield name, place_of(self._folder, name).write(measurement, key)
            for one in parts:
                one.path.unlink(missing_ok=True)

    def _place(self, part: Part) -> ResultStore:
        place = place_of(self._folder, part[0])
        return place if self._count[part[0]] == 1 else place.within(PARTS)

    def _key(self, spec: str, part: Part) -> str:
        key, count = self._there.task_keys[spec][part[0]], self._count[part[0]]
        return key if count == 1 else digest([key, part[1], count])


def _alone(measurement: Measurement, one: TaskEvidence) -> Measurement:
    """Return a measurement of a task without documents."""
    evidence = Evidence((), np.zeros(0), *(np.zeros(0, np.int64),) * 2, (), tasks=(one,))
    return replace(measurement, evidence=evidence)
