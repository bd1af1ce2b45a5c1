"""Measure one subject under the schemes that have not been measured yet.

The identity of a measurement is settled first, so that what is already on disk is found before
anything is loaded; what is missing is then measured in one pass and written as it comes out.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from qaudit.core.registry import parse_merge
from qaudit.core.scheme import Scheme
from qaudit.engine.batches import TOKENS_PER_BATCH, make_batches
from qaudit.engine.cross_check import CrossCheck
from qaudit.engine.machine import libraries
from qaudit.engine.merged import MergedWeights
from qaudit.engine.model.agreement import must_be_one_architecture
from qaudit.engine.model.blocks import Weights
from qaudit.engine.one_pass import Feed, Observer, Progress, Tally, document_sums
from qaudit.engine.results import Filed, Identity, ResultStore, sha256_of
from qaudit.engine.streams import Streams
from qaudit.engine.way import Way
from qaudit.errors import SourceError
from qaudit.sources.places import folder_of
from qaudit.sources.safetensors import WeightFolder, headers
from qaudit.types import FULL_PRECISION, Corpus, Evidence, Measurement, Subject, digest

NUMERICS = 1
"""Raised whenever the engine's arithmetic changes a published number."""


@dataclass(frozen=True)
class Machine:
    """Where and how precisely to compute, and what may be spilled where."""

    device: torch.device
    dtype: torch.dtype
    stream_limit_nbytes: int
    device_stream_limit_nbytes: int = 0
    allow_pickle: bool = False
    self_check: bool = False
    cross_check: int = 0


@dataclass(frozen=True, eq=False)
class Task:
    """One subject, the text it is measured on, and the schemes that apply."""

    subject: Subject
    corpus: Corpus
    schemes: tuple[Scheme, ...]

    def identity(self, scheme: Scheme | None, machine: Machine) -> Identity:
        """Return everything that changes the numbers of this subject under `scheme` (None: fp)."""
        config = folder_of(self.subject.first) / "config.json"
        return Identity(
            subject=self.subject.content,
            model=sha256_of(config),
            scheme=scheme.spec if scheme else FULL_PRECISION,
            scheme_version=scheme.version if scheme else 0,
            corpus=self.corpus.sha256,
            geometry=f"context={self.corpus.protocol.context},batch={TOKENS_PER_BATCH}",
            checks=f"self={machine.self_check},cross={machine.cross_check}",
            dtype=str(machine.dtype),
            device=machine.device.type,
            numerics=NUMERICS,
            libraries=digest(libraries()),
        )


def measure(
    task: Task,
    machine: Machine,
    store: ResultStore,
    progress: Progress = lambda done, total, what: None,
) -> tuple[Filed, ...]:
    """Return the measurements of a task, `fp` first: those on disk, and the rest measured now."""
    weights = _open(task.subject, machine)
    names = [(FULL_PRECISION, FULL_PRECISION), *((s.short, s.spec) for s in task.schemes)]
    asked = (None, *task.schemes)
    keys = {spec: task.identity(s, machine).key for (_, spec), s in zip(names, asked, strict=True)}
    found = {spec: store.find(task.subject.label, short, keys[spec]) for short, spec in names}
    missing = [s for s in task.schemes if found[s.spec] is None]
    if missing or found[FULL_PRECISION] is None:
        measured = _pass(task, weights, missing, machine, progress)
        for _, spec in names:
            if found[spec] is None:
                found[spec] = store.write(measured[spec], keys[spec])
    return tuple(m for m in found.values() if m is not None)


def _open(subject: Subject, machine: Machine) -> Weights:
    """Open a subject's weights, and refuse those that nothing identifies."""
    for checkpoint, _ in subject.members:
        folder = folder_of(checkpoint)
        if not (folder / "config.json").is_file():
            raise SourceError(
                f"no `config.json` in `{folder}`",
                hint="a checkpoint folder has one beside its weights",
            )
    weights = open_weights(subject, allow_pickle=machine.allow_pickle)
    if not all(checkpoint.files for checkpoint, _ in subject.members):
        raise SourceError(
            f"the weights of `{subject.label}` could not be read when the audit was planned",
            hint="run the same command again",
        )
    return weights


def open_weights(subject: Subject, *, allow_pickle: bool) -> Weights:
    """Open a subject's weights: a checkpoint's as they are, a soup's merged as they are read."""
    members = [
        WeightFolder(folder_of(checkpoint), allow_pickle=allow_pickle)
        for checkpoint, _ in subject.members
    ]
    if subject.merge is None:
        return members[0]
    labels = [checkpoint.label for checkpoint, _ in subject.members]
    shares = [share for _, share in subject.members]
    merged = MergedWeights(labels, members, shares, parse_merge(subject.merge))
    must_be_one_architecture(labels, [folder_of(checkpoint) for checkpoint, _ in subject.members])
    return merged


def _pass(
    task: Task, weights: Weights, schemes: Sequence[Scheme], machine: Machine, progress: Progress
) -> dict[str, Measurement]:
    way = Way(folder_of(task.subject.first), weights, machine.dtype, machine.device)
    context = task.corpus.protocol.context
    feed = Feed(
        calibration=make_batches(task.corpus.calibration, context),
        evaluation=make_batches((*task.corpus.evaluation, *task.corpus.choice_windows), context),
    )
    with (
        tempfile.TemporaryDirectory(prefix="qaudit-") as spill,
        Streams(
            Path(spill),
            machine.stream_limit_nbytes,
            machine.device,
            machine.device_stream_limit_nbytes,
        ) as streams,
        _observer(machine.cross_check) as observe,
    ):
        tallies = way.run(feed, schemes, streams, progress, observe, check=machine.self_check)
    tallies[FULL_PRECISION].weights, tallies[FULL_PRECISION].bits = _stored(task.subject, weights)
    shorts = {FULL_PRECISION: FULL_PRECISION, **{s.spec: s.short for s in schemes}}
    return {
        spec: _measurement(task, shorts[spec], spec, tally, _per_document(task.corpus, feed, tally))
        for spec, tally in tallies.items()
    }


def _stored(subject: Subject, weights: Weights) -> tuple[int, int]:
    """Return how many weights there are and how many bits they take as they are."""
    count = sum(math.prod(weights.shape(name)) for name in weights.names())
    try:
        tensors = headers(folder_of(subject.first)).values()
    except SourceError:  # pickled: what the files take is near enough
        return count, 8 * subject.first.nbytes
    return count, 8 * sum(tensor.nbytes for tensor in tensors)


@contextmanager
def _observer(cross_check: int) -> Iterator[Observer]:
    """Watch what schemes do with GPTQModel's eyes, if asked to."""
    if not cross_check:
        yield lambda scheme, linears, quantized: None
        return
    with CrossCheck(cross_check) as check:
        yield check.observe


def _per_document(corpus: Corpus, feed: Feed, tally: Tally) -> tuple[np.ndarray, np.ndarray]:
    """Sum a stream's losses over documents, and behind them over (item, option) pairs."""
    windows = [(w.document, w.scored_from) for w in corpus.evaluation]
    first = len(corpus.documents)
    windows += [(first + w.document, w.scored_from) for w in corpus.choice_windows]
    options = sum(len(choice.options) for choice in corpus.choices)
    return document_sums(feed.evaluation, tally.nll, windows, first + options)


def _measurement(
    task: Task, short: str, spec: str, tally: Tally, sums: tuple[np.ndarray, np.ndarray]
) -> Measurement:
    return Measurement(
        subject=task.subject.label,
        scheme=short,
        spec=spec,
        evidence=_evidence(task.corpus, *sums),
        bits_per_weight=tally.bits_per_weight,
        seconds=tally.seconds,
        calibration_seed=task.corpus.protocol.calibration_seed,
        notes=tuple(tally.notes),
    )


def _evidence(corpus: Corpus, sums: np.ndarray, tokens: np.ndarray) -> Evidence:
    count = len(corpus.documents)
    items = [i for i, choice in enumerate(corpus.choices) for _ in choice.options]
    return Evidence(
        document_sha256=tuple(d.sha256 for d in corpus.documents),
        nll_sum=sums[:count],
        tokens=tokens[:count],
        nbytes=np.array([d.nbytes for d in corpus.documents], dtype=np.int64),
        split=tuple(d.split for d in corpus.documents),
        choice_nll=sums[count:] if items else None,
        choice_items=np.array(items, dtype=np.int64) if items else None,
        choice_answers=np.array([c.answer for c in corpus.choices]) if items else None,
    )
