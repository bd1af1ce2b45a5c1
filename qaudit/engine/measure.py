"""Measure one subject under the schemes that have not been measured yet.

What is already on disk is found first (`tasks`), before anything is loaded or even fetched; what
is missing is then measured in one pass and written as it comes out.

Weights of this machine are held against the plan before and after (`stamps`); those of the
Hub are checked where they are fetched.

What to do where a GPU runs out of memory in a pass.

The pass starts again with its hidden states on the host, which gives the same numbers; then with
batches of half the windows, and with one window at a time, which round otherwise. Measurements
carry a note of it.

The bytes of a subject: all of its tensors as they are stored, and with its linears quantized.

A quantized model keeps embeddings, head, norms and biases as they are stored, so that its size
is that of the subject, less its linears, plus what a scheme stores for these.
"""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.safetensors import headers, unread_tensors
from qaudit.checkpoints.stamps import folder_of, unchanged_files
from qaudit.core.linears import Linears, Quantized
from qaudit.core.registry import origins
from qaudit.core.scheme import Calibration, Scheme, Shipped, shipped_reference
from qaudit.engine.block_pass import (
    Progress,
    Route,
    feed_of,
    kept_pass,
    open_weights,
    opened_states,
    place_of,
)
from qaudit.engine.kept_weights import (
    LinearHashes,
    Restored,
    WeightKeeper,
    expert_ends,
    is_whole,
    rest_names,
    rest_sha256,
    restored,
)
from qaudit.engine.read_out import evidence_of
from qaudit.engine.shipped import OTHER_SUBJECT
from qaudit.engine.streams import Observer
from qaudit.engine.tally import Tally
from qaudit.engine.tasks import Machine, StoredResults, Task, folder_for, look_up, short_of
from qaudit.engine.tokens import REFERENCE, Feed
from qaudit.errors import ModelError, SourceError, is_out_of_memory
from qaudit.formats.weights import QuantizedFolder
from qaudit.items.tokens import ItemText
from qaudit.model.blocks import Weights
from qaudit.model.config import is_remote
from qaudit.model.proven import reads_trees
from qaudit.model.stored_names import skeleton_of_names, stored_name
from qaudit.planning.price import with_shipped
from qaudit.planning.sizes import ROUND_TOKENS
from qaudit.saved.exports import kept_folder
from qaudit.saved.results import ResultFile, ResultStore
from qaudit.types import FULL_PRECISION, Corpus, Evidence, Measurement

ON_HOST = "the GPU ran out of memory: hidden states waited on the host"


Attempt = tuple[Machine, Feed, tuple[str, ...]]
"""One way to run a pass, and its notes."""


def attempts(machine: Machine, feed: Feed) -> list[Attempt]:
    """Return ways to run a pass, each with less on the GPU than the one before."""
    if machine.device.type == "cpu":
        return [(machine, feed, ())]
    on_host = replace(machine, device_stream_limit_nbytes=0)
    ways: list[Attempt] = [(machine, feed, ()), (on_host, feed, (ON_HOST,))]
    texts = feed.calibration, feed.evaluation
    most = max((len(batch.windows) for batches in texts for batch in batches), default=1)
    for windows in sorted({-(-most // 2), 1} - {most}, reverse=True):
        calibration, evaluation = (
            tuple(
                batch.of_rows(slice(k, k + windows))
                for batch in batches
                for k in range(0, len(batch.windows), windows)
            )
            for batches in texts
        )
        note = f"{ON_HOST}, in batches of {windows}: last digits differ"
        narrower = replace(feed, calibration=calibration, evaluation=evaluation)
        ways.append((on_host, narrower, (note,)))
    return ways


@dataclass(frozen=True)
class StoredSizes:
    """The tensors of a subject."""

    elements: Mapping[str, int]
    nbytes: Mapping[str, int]  # empty: of pickled tensors only the sum is known
    total_nbytes: int
    unread_nbytes: int = 0  # of files that are not downloaded

    @property
    def whole_nbytes(self) -> int:
        return self.total_nbytes + self.unread_nbytes

    def quantized_nbytes(self, tally: Tally) -> int | None:
        """Return the bytes of all tensors with the linears of a tally quantized.

        None where it is not known what the linears take as they are stored, by name or by their
        one dtype.
        """
        ends = (*(f".{name}.weight" for name in tally.linears), *expert_ends(tally.linears))
        names = [name for name in self.elements if name.endswith(ends)]
        if not self.nbytes:
            linears = round(self.total_nbytes * tally.weights / sum(self.elements.values()))
        elif sum(self.elements[name] for name in names) == tally.weights:
            linears = sum(self.nbytes[name] for name in names)
        else:  # the checkpoint has other names than the library's modules
            sizes = {self.nbytes[name] / n for name, n in self.elements.items() if n > 1}
            if len(sizes) != 1:
                return None
            linears = round(tally.weights * sizes.pop())
        return self.whole_nbytes - linears + -(-tally.bits // 8)


def sizes_of(task: Task, weights: Weights) -> StoredSizes:
    """Read the sizes of a subject's tensors; of a soup those of its first member."""
    elements = {name: math.prod(weights.shape(name)) for name in weights.names()}
    first = task.subject.first
    if isinstance(weights, QuantizedFolder):
        nbytes = {name: weights.nbytes_of(name) for name in elements}
        return StoredSizes(elements, nbytes, weights.nbytes)
    try:
        whole = first.base if first.base is not None and first.is_adapter else first
        folder = task.folder(whole)
        tensors = headers(folder, unread_tensors([folder], [whole]))
    except SourceError:  # pickled: what the files take is near enough
        return StoredSizes(elements, {}, first.nbytes)
    nbytes = {name: tensors[name].nbytes for name in elements}
    unread_nbytes = sum(file.nbytes for file in first.unread)
    return StoredSizes(elements, nbytes, sum(nbytes.values()), unread_nbytes)


WEIGHTS = "weights"
"""The folder in `evidence/` for quantized weights between rounds of items."""


def measure(
    task: Task,
    machine: Machine,
    store: ResultStore,
    progress: Progress = lambda done, total, what: None,
    watch: Observer | None = None,
    stored: StoredResults | None = None,
    check: Observer | None = None,
) -> tuple[ResultFile, ...]:
    """Return the results of a pass, `fp` first: those on disk, and the rest measured now.

    `watch` sees every group of linears that a scheme quantized, and `check` those that are
    quantized now, in a pass that may go on at a block; `stored` is what was looked up.
    """
    task = task.with_tables(store.folder)
    stored = stored or look_up(task, machine, store)
    if stored.is_complete:
        return stored.results
    evidence, files = folder_for(task, store).folder, dict(stored.files)
    remaining = _without(task, stored)
    members = [folder_of(checkpoint) for checkpoint, _ in task.subject.members]
    trees = all(reads_trees(read_configuration(member)) for member in members)
    rounds = in_rounds(remaining.corpus, trees=trees)
    folders, keeper = _quantized_weights(remaining, machine, stored, evidence, len(rounds))
    for corpus in rounds:
        is_first = corpus is rounds[0]
        observe = watch if is_first else None
        round_task = replace(
            remaining,
            corpus=corpus,
            schemes=remaining.schemes if observe else restored(remaining.schemes, folders),
            compared=remaining.compared and is_first,
            keeper=keeper if is_first else None,
        )
        if len(rounds) == 1 and observe is None:
            round_task = replace(round_task, resume=place_of(round_task, stored, evidence))
        with unchanged_files(with_shipped(task.subject, task.pass_.beside), task.folder) as hashes:
            measurements = send(round_task, machine, progress, observe or check)
        if is_first and len(rounds) > 1:
            keeper.mark_whole()
        for spec, measurement in measurements.items():
            results = _by_task(replace(measurement, weights_sha256=hashes))
            if not is_first:
                del results[None]
            for name, result in results.items():
                part = spec, name
                if part not in stored.files:
                    place, identity = folder_for(task, store, name), stored.identities[part]
                    files[part] = place.write(result, identity.key, identity)
        if round_task.resume is not None:
            with suppress(OSError):
                round_task.resume[0].unlink(missing_ok=True)
                round_task.resume[0].parent.rmdir()  # unless another pass is kept there
    for folder in folders.values():
        if folder.parent.name == WEIGHTS:
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # other processes may keep theirs
        (evidence / WEIGHTS).rmdir()
    return replace(stored, files=files).results


def _by_task(measured: Measurement) -> dict[str | None, Measurement]:
    """Return what files hold: documents and hashes in one, each task in another."""
    evidence, empty = measured.evidence, np.zeros(0, np.int64)
    bare = replace(measured, linears_sha256={}, rest_sha256="")
    nothing = Evidence((), np.zeros(0), empty, empty)
    return {
        **{t.task: replace(bare, evidence=replace(nothing, tasks=(t,))) for t in evidence.tasks},
        None: replace(measured, evidence=replace(evidence, tasks=())),
    }


def in_rounds(corpus: Corpus, *, trees: bool) -> tuple[Corpus, ...]:
    """Return rounds of whole tasks, by what a model with or without trees feeds.

    Between blocks every stream keeps the hidden states of all its tokens: twenty million tokens of
    a 7B model would be 1.5 TB for nine streams. The first round has the documents. Tasks are
    batched by themselves, so that losses do not depend on the tasks beside them, and stored as
    their round ends: a process that is killed loses one round.
    """
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


def _quantized_weights(
    task: Task, machine: Machine, stored: StoredResults, evidence: Path, rounds: int
) -> tuple[dict[str, Path], WeightKeeper]:
    """Return folders of quantized weights, by canonical form, and what writes them.

    `export` reads those of a plan's first draw, and later rounds those of schemes that calibrate.
    """
    exported = set() if task.pass_.draw or task.perturbed else {*machine.keeps_weights}
    exported &= task.streams.keys()
    folders = {
        spec: kept_folder(evidence, stored.keys[spec])
        if spec in exported
        else evidence / WEIGHTS / stored.keys[spec][:32]
        for spec in task.streams
    }
    calibrated = {s.spec for s in task.schemes if s.calibration is not Calibration.NONE}
    written = {
        spec: folders[spec]
        for spec in (exported | calibrated if rounds > 1 else exported)
        if not is_whole(folders[spec])
    }
    rest = kept_folder(evidence, task.subject.content) if exported else None
    return folders, WeightKeeper(written, rest)


def _without(task: Task, stored: StoredResults) -> Task:
    """Return the part of a task that is not on disk."""
    missing = {spec for spec, _ in stored.missing}
    corpus = task.corpus.of_tasks({name for _, name in stored.missing if name is not None})
    if all(name is not None for _, name in stored.missing):
        corpus = corpus.without_evaluation()
        task = replace(task, compared=False)
    schemes = tuple(scheme for scheme in task.schemes if scheme.spec in missing)
    missing_part = replace(task, corpus=corpus, schemes=schemes)
    return missing_part.changed(full_precision=FULL_PRECISION in missing)


def send(
    task: Task, machine: Machine, progress: Progress, watch: Observer | None
) -> dict[str, Measurement]:
    """Send a task's text through its model once; measure every stream."""
    weights = open_weights(task.subject, allow_pickle=machine.allow_pickle, folder=task.folder)
    for on, feed, notes in attempts(machine, feed_of(task, machine, weights)):
        for each in (task.keeper, *task.schemes):
            if isinstance(each, WeightKeeper | Restored):
                each.begin()
        try:
            with opened_states(on) as states, LinearHashes() as hashes:
                keep = task.keeper.observe if task.keeper is not None else None
                observers = [*filter(None, (hashes.observe, keep, watch))]

                def observe(scheme: Scheme, linears: Linears, quantized: Quantized) -> None:
                    for show in observers:  # noqa: B023 - called in this pass
                        show(scheme, linears, quantized)

                tallies = Route(folder_of(task.subject.first), weights, on).follow(
                    feed,
                    task.schemes,
                    states,
                    lambda done, total, what: progress(done, total, what + task.remark),
                    observe,
                    kept_pass(task, on, feed, hashes),
                )
            for tally in tallies.values():
                tally.note(*notes)
            return _measurements(task, weights, feed, tallies, hashes)
        except RuntimeError as error:
            if on.device.type == "cpu" or not is_out_of_memory(error):
                raise
        gc.collect()  # the error had hold of the frames, and they of tensors
        torch.cuda.empty_cache()
    raise ModelError(
        f"out of memory while measuring `{task.subject.label}`, with hidden states on the host and "
        "one window at a time too",
        hint="lower `--set context=N`, or use a `--device` with more memory",
    )


def _measurements(
    task: Task, weights: Weights, feed: Feed, tallies: Mapping[str, Tally], hashes: LinearHashes
) -> dict[str, Measurement]:
    if not feed.evaluation and not feed.items:
        return {}
    sizes, subject = sizes_of(task, weights), task.subject
    parameters = sum(sizes.elements.values())
    for spec, tally in tallies.items():
        if tally.error is not None:
            task.failed[short_of(task.streams.get(spec))] = tally.error
    full = tallies[FULL_PRECISION]
    if isinstance(weights, QuantizedFolder) and task.pass_.is_quantized:
        for file in (scheme for scheme in task.schemes if isinstance(scheme, Shipped)):
            tallies[file.spec].note(
                f"audited without a reference: `{file.file}` is quantized already ({file.format}, "
                f"{file.bits}-bit); its loss is measured, and what quantization added is not"
            )
    elif isinstance(weights, QuantizedFolder):
        full.note(shipped_reference(subject.label, weights.format, weights.bits))
        full.note(*weights.decoded_notes)
    full.weights, full.bits = parameters, 8 * sizes.total_nbytes
    yardstick, reference = tallies.get(REFERENCE, full), tallies.get(OTHER_SUBJECT)
    streams = {spec: s for spec, s in task.streams.items() if tallies[spec].error is None}
    linears = {spec: hashes.of(spec) for spec in streams}
    rest, folder = "", folder_of(subject.first)
    quantized = next((tuple(linears[spec]) for spec in streams if linears[spec]), ())
    if quantized and not is_remote(folder):  # such models are not exported
        skeleton = skeleton_of_names(folder, weights)
        unread = skeleton.unread(weights.names())
        read = [name for name in weights.names() if name not in unread]
        outside = rest_names(partial(stored_name, skeleton), read, quantized)
        if task.keeper is not None and not unread and not subject.first.unread:
            task.keeper.keep_rest(weights, outside)
        rest = rest_sha256(weights, outside)
    measured = {}
    for spec, scheme in streams.items():
        tally = tallies[spec]
        nbytes = tally.nbytes
        if nbytes is None:
            nbytes = sizes.quantized_nbytes(tally) if scheme else sizes.whole_nbytes
        evidence = evidence_of(task.corpus, feed, tally, yardstick, reference)  # which notes, too
        plugins = origins([scheme] if scheme else (), [subject.merge])
        measured[spec] = Measurement(
            subject=subject.label,
            scheme=short_of(scheme),
            spec=spec,
            evidence=evidence,
            bits_per_weight=tally.bits_per_weight,
            seconds=tally.seconds,
            calibration_seed=task.corpus.protocol.calibration_seed,
            notes=tuple(tally.notes),
            parameters=parameters,
            nbytes=nbytes,
            bit_class=scheme.class_at(tally.bits_per_weight) if scheme else FULL_PRECISION,
            calibrates=scheme is not None and scheme.calibrates,
            plugins=tuple(dict.fromkeys(map(str, plugins))),
            mixture=tally.mixture,
            linears_sha256=linears[spec],
            rest_sha256=rest if linears[spec] else "",
        )
    return measured


def quantize_only(
    task: Task, schemes: Sequence[Scheme], machine: Machine, progress: Progress, watch: Observer
) -> None:
    """Show what schemes make of the weights, without measuring what that costs."""
    corpus = task.corpus.of_documents().without_evaluation()
    unmeasured = replace(task, corpus=corpus, schemes=tuple(schemes))
    with unchanged_files(task.subject, task.folder):
        send(unmeasured.changed(full_precision=False), machine, progress, watch)
