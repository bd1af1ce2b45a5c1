"""Items of tasks in rounds of bounded length, so that their hidden states are bounded, too.

Between blocks every stream keeps the hidden states of all its tokens. Twenty million tokens of a
7B model would be 1.5 TB for nine streams, so that items go through in rounds. The first has the
documents, and writes what schemes that calibrate make of the weights; later ones read that. How
long a round is never depends on the machine, because windows are trees of what a round has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from qaudit.core.scheme import Calibration, Scheme
from qaudit.engine.stored_weights import Stored, Storing, is_whole
from qaudit.engine.tasks import Task
from qaudit.items.kept import ItemText
from qaudit.planning.price import ROUND_TOKENS
from qaudit.types import Corpus, Measurement, TaskEvidence

Send = Callable[[Task, int], Mapping[str, Measurement]]
"""Send a part of a task through its model; the second argument counts the rounds from zero."""


def in_rounds(task: Task, send: Send) -> Iterator[tuple[int, dict[str, Measurement]]]:
    """Yield the measurements of each round; a task of items is in the round that completes it."""
    corpora = split(task.corpus)
    if len(corpora) == 1:
        yield 0, dict(send(task, 0))
        return
    left = {name: _items_of(task.corpus, name) for name in task.corpus.tasks}
    parts: dict[tuple[str, str], list[TaskEvidence]] = {}
    with TemporaryDirectory(prefix="qaudit-") as folder:
        for number, corpus in enumerate(corpora):
            schemes = tuple(_kept(scheme, Path(folder)) for scheme in task.schemes)
            part = replace(task, corpus=corpus, schemes=schemes)
            part = part if number == 0 else replace(part, compared=False)
            measurements = dict(send(part, number))
            for scheme in schemes:
                if isinstance(scheme, Storing):
                    scheme.finish()
            for name in corpus.tasks:
                left[name] -= _items_of(corpus, name)
            for spec, one in measurements.items():
                tasks = tuple(_complete(one.evidence.tasks, spec, left, parts))
                evidence = replace(one.evidence, tasks=tasks)
                measurements[spec] = replace(one, evidence=evidence)
            yield number, measurements


def _complete(
    tasks: Sequence[TaskEvidence],
    spec: str,
    left: Mapping[str, int],
    parts: dict[tuple[str, str], list[TaskEvidence]],
) -> Iterator[TaskEvidence]:
    """Keep the parts of tasks, and yield those tasks of which no item is left."""
    for one in tasks:
        kept = parts.setdefault((spec, one.task), [])
        kept.append(one)
        if not left[one.task]:
            yield joined(parts.pop((spec, one.task)))


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


def split(corpus: Corpus, most_tokens: int | None = None) -> tuple[Corpus, ...]:
    """Return parts of a corpus: the first with its documents, each with a round of items."""
    most_tokens = most_tokens or ROUND_TOKENS
    starts, tokens, first = [(0, 0)], 0, 0
    for number, item in enumerate(corpus.items):
        windows = corpus.item_windows[first : first + item.options]
        own = ItemText((item,), windows).tokens
        if tokens and tokens + own > most_tokens:
            starts.append((number, first))
            tokens = 0
        tokens += own
        first += item.options
    ends = [*starts[1:], (len(corpus.items), len(corpus.item_windows))]
    parts: list[Corpus] = []
    for (start, window), (last_item, last_window) in zip(starts, ends, strict=True):
        own_windows = corpus.item_windows[window:last_window]
        part = replace(
            corpus,
            items=corpus.items[start:last_item],
            item_windows=tuple(replace(w, document=k) for k, w in enumerate(own_windows)),
        )
        parts.append(replace(part, evaluation=(), documents=()) if parts else part)
    return tuple(parts)


def _items_of(corpus: Corpus, task: str) -> int:
    return sum(item.task == task for item in corpus.items)


def _kept(scheme: Scheme, folder: Path) -> Scheme:
    """Return a scheme that stores or reads what it makes, where it has to calibrate for that."""
    if scheme.calibration is Calibration.NONE:
        return scheme
    own = folder / scheme.short.replace("/", "-")
    if is_whole(own):
        return Stored(inner=scheme, folder=own)
    return Storing(inner=scheme, folder=own)
