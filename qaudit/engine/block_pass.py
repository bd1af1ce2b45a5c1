"""One subject, once through its blocks, all streams side by side.

    embed -> for each block: [ full precision | scheme | scheme | ... ] -> one read-out

A block's tensors are read once. Each stream in turn makes the block's linears what they are for
it, and sends its evaluation tokens through. The read-out walks batch by batch over all streams.
No quantized model ever exists as a whole, and none is written.

How a subject is run: in blocks where that gives the numbers of `transformers`, else not at all.

A family that a test holds bit-identical to `transformers` runs in blocks at once. Any other is
first compared with the whole model on one short batch, which takes the memory of the model; what
differs in a bit, or cannot be taken apart, is refused. Code of a repository never counts as a
tested family, and a note says that it was run.

What a pass begins with: weights, the files and the reference beside them, text in batches.

A pass that is kept at the entrance of a block, so that the same command goes on there.

    header (JSON, one line)  the hidden states, in order  sha256 of all before

A subject of a large model takes hours. Every few minutes the hidden states of all streams, items
included, what streams have counted and the hashes of linears go to one file of `evidence/passes`,
which replaces the one before: twice the hidden states is what it takes of the disk at most. The
clock decides when to write and nothing else: a pass that goes on has the numbers of one that was
never stopped. A file of another pass, or a damaged one, is as none; a full disk ends the keeping,
not the audit.

Given up: passes whose items go through in several rounds, and those whose quantized weights a
diagnostic sees. They begin again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from qaudit.checkpoints.adapters import open_checkpoint
from qaudit.checkpoints.safetensors import unread_tensors
from qaudit.checkpoints.stamps import folder_of, own_folder, weights_of
from qaudit.core.registry import parse_merge
from qaudit.core.scheme import Calibration, Scheme, Shipped
from qaudit.engine.batches import TOKENS_PER_BATCH, backwards, make_batches, make_rollout_batches
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.kept_weights import LinearHashes
from qaudit.engine.mixing import Scores, table_of
from qaudit.engine.read_out import read_out
from qaudit.engine.shipped import ReferenceStream, ShippedStream, open_reference, open_shipped
from qaudit.engine.streams import FullPrecision, Observer, SchemeStream, Stream
from qaudit.engine.tally import REPLAYED, RoutingWatch, Tally, timed
from qaudit.engine.tasks import Machine, StoredResults, Task
from qaudit.engine.tokens import REFERENCE, Feed, Tokens
from qaudit.errors import ModelError, SourceError
from qaudit.formats.weights import QuantizedFolder, quantization_of
from qaudit.host import share_one_arena
from qaudit.model.blocks import CHECKED, BlockModel, Weights, self_check
from qaudit.model.config import foreign, is_remote, must_be_one_architecture, ran, read_config
from qaudit.model.device import fits_whole
from qaudit.model.routes import MergedWeights
from qaudit.model.skeleton import load_whole
from qaudit.model.structure import notes_of_left
from qaudit.saved.results import slug_of
from qaudit.types import FULL_PRECISION, Checkpoint, Subject, digest
from qaudit.whole import partial_name

Progress = Callable[[int, int, str], None]
"""Called as (blocks done, blocks in all, what is being done)."""


@torch.no_grad()
def run_blocks(
    model: BlockModel,
    feed: Feed,
    schemes: Sequence[Scheme],
    states: HiddenStates,
    progress: Progress = lambda done, total, what: None,
    observe: Observer = lambda scheme, linears, quantized: None,
    kept: KeptPass | None = None,
) -> Mapping[str, Tally]:
    """Send everything through the model once; return a tally for `fp` and for each spec.

    `kept` is where the pass is kept, to go on at a block.
    """
    share_one_arena()  # the command line has done it, and other programs may not
    kinds = {scheme.calibration for scheme in schemes}
    calibrates = bool(kinds - {Calibration.NONE})
    replays = model.experts.replays and model.has_experts
    compared, traces = feed.compared and bool(schemes), replays and calibrates
    tokens = Tokens(model, feed, states, RoutingWatch(feed.evaluation, replays=replays))
    evaluated = feed.full_precision or ((compared or replays) and not feed.perturbed)
    full = FullPrecision(schemes, evaluated=evaluated, routes=traces)
    streams: list[Stream] = [full]
    if feed.perturbed and (feed.compared or replays):  # what the others are compared with is first
        streams.insert(0, FullPrecision(evaluated=True, routes=traces, name=REFERENCE))
    streams += [SchemeStream(s, full, observe) for s in schemes if not isinstance(s, Shipped)]
    unopened: dict[str, Tally] = {}
    for scheme in schemes:
        if isinstance(scheme, Shipped):
            try:
                opened = feed.shipped[scheme.spec](model)
            except SourceError as error:
                unopened[scheme.spec] = Tally(error=error)
            else:
                streams.append(ShippedStream(scheme, opened, tokens))
    if feed.reference is not None and feed.evaluation:
        streams.append(ReferenceStream(feed.reference(model), tokens))
    if any(scheme.rotates_outputs for scheme in schemes):
        model.inspector.rotations = True
    tokens.embed(calibration=calibrates, mini_batches=Calibration.WHOLE_BLOCK in kinds)
    scores: Scores = {}
    for stream in streams:
        if isinstance(stream, SchemeStream) and stream.name in feed.tables:
            with timed(model.device, stream.tally):
                stream.take(table_of(stream.name, model, feed, states, progress, scores))
    del scores
    run_streams(tokens, streams, progress, kept)
    tallies = {**{stream.name: stream.tally for stream in streams}, **unopened}
    for scheme in schemes:
        tallies[scheme.spec].note(*filter(None, [scheme.remark]), *notes_of_left(model.left))
        tallies[scheme.spec].note_experts()
        tallies[scheme.spec].note(*([REPLAYED] if replays else ()))
    return tallies


def run_streams(
    tokens: Tokens, streams: Sequence[Stream], progress: Progress, kept: KeptPass | None = None
) -> None:
    """Send streams through the blocks of a model, side by side, and read them out."""
    model, states = tokens.model, tokens.states
    first = kept.resume(states, streams, model) if kept is not None else 0
    if first:
        # Every model notes what its blocks are called with, and begins behind some of them.
        tokens.drop_embedded(first - 1)
        for stream in streams:
            if (of_stream := stream.tokens(tokens)) is not tokens:
                of_stream.embed(calibration=False)
                of_stream.drop_embedded(first - 1)
    for block in model.blocks(first):
        block.choose = tokens.routes.choose
        for stream in streams:
            progress(block.index, model.num_blocks, stream.label)
            if stream.tally.error is not None:
                continue
            is_full = stream is streams[0]
            with timed(model.device, stream.tally), tokens.routes.of(stream.tally, is_full=is_full):
                try:
                    entered = stream.enter(block, tokens)
                    if stream.evaluated:
                        stream.tokens(tokens).evaluate(stream.name, entered)
                except SourceError as error:
                    if not isinstance(stream, ShippedStream):
                        raise
                    stream.fail(error)  # a file that cannot be read ends its own stream alone
                stream.leave(block)
        tokens.routes.forget()
        tokens.drop_embedded(block.index)
        if kept is not None:
            kept.keep(block.index + 1, states, streams, model)
    states.drop(f"calibration/{FULL_PRECISION}")  # what the last block was learned on
    progress(model.num_blocks, model.num_blocks, "head")
    read_out(tokens, [stream for stream in streams if stream.evaluated])


_EXPERTS_WITHIN = {2: 2e-2, 4: 1e-5, 8: 1e-12}
"""How far logits may be from the whole model's where there are experts, by bytes of a number."""


@dataclass(frozen=True, eq=False)
class Route:
    """How one subject's weights are run."""

    folder: Path
    weights: Weights
    machine: Machine

    def follow(
        self,
        feed: Feed,
        schemes: Sequence[Scheme],
        states: HiddenStates,
        progress: Progress,
        observe: Observer = lambda scheme, linears, quantized: None,
        kept: KeptPass | None = None,
    ) -> Mapping[str, Tally]:
        """Open the model, and send everything through it."""
        batches = (*feed.calibration, *feed.evaluation)
        highest = max((int(batch.tokens_BT.max()) for batch in batches), default=0)
        config = read_config(self.folder, trust_remote_code=self.machine.trust_remote_code)
        vocabulary = int(getattr(config.get_text_config(), "vocab_size", None) or highest + 1)
        if highest >= vocabulary:
            raise ModelError(
                f"the model in `{self.folder}` knows {vocabulary} tokens, "
                f"and its tokenizer makes token {highest}",
                hint="take the tokenizer that belongs to the model",
            )
        remote = is_remote(self.folder)
        with foreign(self.folder, "while it is measured") if remote else nullcontext():
            model, notes = self.streamed()
            tallies = run_blocks(model, feed, schemes, states, progress, observe, kept)
        tallies[FULL_PRECISION].note(*notes, *model.notes)
        if remote:
            for tally in tallies.values():
                tally.note(ran(self.folder))
        return tallies

    def streamed(self) -> tuple[BlockModel, tuple[str, ...]]:
        """Return the model as blocks, and notes of its check."""
        machine, trusted = self.machine, self.machine.trust_remote_code
        fits = fits_whole(self.weights, machine.dtype, machine.device)
        if is_remote(self.folder) and not fits:
            raise ModelError(
                f"the model in `{self.folder}` is code of its own, with which its blocks are "
                "compared, and does not fit in memory as a whole",
                hint="use a machine with more memory",
            )
        model = BlockModel(
            self.folder,
            self.weights,
            dtype=machine.dtype,
            device=machine.device,
            trust_remote_code=trusted,
            experts=machine.experts,
        )
        if model.is_streamable:
            return model, ()
        if not fits:
            raise ModelError(
                f"`{model.model_type}` is not a family this engine is tested on, and the whole "
                "model does not fit in memory to check it",
                hint="use a machine with more memory, or `--device` with a larger one",
            )
        whole = load_whole(self.folder, self.weights, machine.dtype, trust_remote_code=trusted)
        difference = self_check(model, whole)
        # The library's kernels for experts are others than a product for each.
        most = _EXPERTS_WITHIN[machine.dtype.itemsize] if model.has_experts else 0.0
        if not difference <= most:
            raise ModelError(
                f"the blocks of a `{model.model_type}`, run one at a time, give other logits than "
                f"the whole model, by {difference:.1e} of the largest",
                hint="only models that run block by block can be audited",
            )
        tokens = math.prod(CHECKED)
        result = f"within {difference:.1e} of" if difference else "bit-identical to"
        note = f"self-check on {tokens} tokens: streamed logits {result} the whole model's"
        return model, (note,)


def open_weights(
    subject: Subject, *, allow_pickle: bool, folder: Callable[[Checkpoint], Path] = own_folder
) -> Weights:
    """Open a subject's weights: a checkpoint's as they are, a soup's merged as they are read."""
    checkpoints = [checkpoint for checkpoint, _ in subject.members]
    places = [folder(checkpoint) for checkpoint in checkpoints]
    if subject.merge is None and not subject.first.is_adapter and quantization_of(places[0]):
        return QuantizedFolder(places[0])
    without = unread_tensors(places, checkpoints)
    members = [
        open_checkpoint(checkpoint, allow_pickle=allow_pickle, folder=folder, without=without)
        for checkpoint in checkpoints
    ]
    if subject.merge is None:
        return members[0]
    labels = [checkpoint.label for checkpoint in checkpoints]
    shares = [share for _, share in subject.members]
    merge = partial(parse_merge(subject.merge).merge, weights=shares)
    merged = MergedWeights(labels, members, merge)
    must_be_one_architecture(labels, [*map(folder_of, checkpoints)])
    return merged


@contextmanager
def opened_states(machine: Machine) -> Iterator[HiddenStates]:
    """Hold hidden states for one pass."""
    limits = machine.stream_limit_nbytes, machine.device, machine.device_stream_limit_nbytes
    with (
        tempfile.TemporaryDirectory(prefix="qaudit-") as spill,
        HiddenStates(Path(spill), *limits) as states,
    ):
        yield states


def feed_of(task: Task, machine: Machine, weights: Weights) -> Feed:
    """Return what a pass feeds: text in batches, and the files and the reference beside it.

    One that rounds otherwise has smaller batches in reverse, and documents alone.
    """
    corpus, context, limit = task.corpus, task.corpus.protocol.context, task.pad_until
    size = TOKENS_PER_BATCH // 2 if task.perturbed else TOKENS_PER_BATCH
    calibration, documents = (
        make_batches(windows, context, size, limit)
        for windows in (corpus.calibration, corpus.evaluation)
    )
    if task.perturbed:
        calibration = backwards(calibration)
    else:
        documents = (*documents, *make_rollout_batches(corpus, pad_until=limit))
    names, base = frozenset(weights.names()), folder_of(task.subject.first)
    files = {
        shipped.label: weights_of(shipped, task.folder(shipped)) for shipped in task.pass_.shipped
    }
    reference, subject = None, task.pass_.reference
    if subject is not None:
        reference = partial(
            open_reference,
            subject.label,
            folder_of(subject.first) if subject.first.base else task.folder(subject.first),
            partial(open_weights, subject, allow_pickle=machine.allow_pickle, folder=task.folder),
            trust_remote_code=machine.trust_remote_code,
        )
    return Feed(
        calibration,
        documents,
        full_precision=task.pass_.full_precision,
        compared=task.compared,
        perturbed=task.perturbed,
        items=() if task.perturbed else corpus.windows_by_task,
        shipped={
            scheme.spec: partial(open_shipped, scheme, files[scheme.file], base, names)
            for scheme in task.schemes
            if isinstance(scheme, Shipped)
        },
        reference=reference,
        column_loop=machine.column_loop,
        tables=task.tables,
    )


EVERY_SECONDS = 300.0
FOLDER = "passes"
"""In `evidence/`."""

_MADE_AGAIN = ("inputs/", "given/")  # what groups of a block read, and what tokens tell blocks


class KeptPass:
    """The file of one pass."""

    def __init__(self, path: Path, key: str, hashes: LinearHashes) -> None:
        """`key` is everything that decides the hidden states."""
        self._path, self._key, self._hashes = path, key, hashes
        self._written, self._keeps = time.monotonic(), True

    def resume(self, states: HiddenStates, streams: Sequence[Stream], model: BlockModel) -> int:
        """Read what was kept; return the block to go on at, 0 where nothing was."""
        try:
            with self._path.open("rb") as file:
                header = self._read(file, states)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            header = None
        if header is None or header["streams"].keys() != {stream.name for stream in streams}:
            return 0
        for stream in streams:
            stream.restore(header["streams"][stream.name])
        self._hashes.restore(header["hashes"])
        model.left.update(header["left"])
        return int(header["block"])

    def _read(self, file: BinaryIO, states: HiddenStates) -> dict[str, Any] | None:
        line = file.readline()
        header: dict[str, Any] = json.loads(line)
        if header.get("key") != self._key:
            return None
        sha256 = hashlib.sha256(line)
        for stream, batch, shape, dtype in header["states"]:
            kind = getattr(torch, dtype)
            raw = file.read(size := int(np.prod(shape)) * kind.itemsize)
            if len(raw) != size:
                break  # the file is cut short
            sha256.update(raw)
            read = torch.from_numpy(np.frombuffer(bytearray(raw), np.uint8))
            states.put(stream, batch, read.view(kind).reshape(shape))
        if file.read() == sha256.digest():
            return header
        for stream in {stream for stream, *_ in header["states"]}:
            states.drop(stream)
        return None

    def keep(
        self, block: int, states: HiddenStates, streams: Sequence[Stream], model: BlockModel
    ) -> None:
        """Write the state at the entrance of a block, if the last time is long ago."""
        if not self._keeps or time.monotonic() - self._written < EVERY_SECONDS:
            return
        if any(stream.tally.error is not None for stream in streams):
            return  # a file that cannot be read fails at its block again
        listed = [entry for entry in states.listed() if not entry[0].startswith(_MADE_AGAIN)]
        header = {
            "key": self._key,
            "block": block,
            "states": [
                [stream, batch, list(shape), str(dtype).removeprefix("torch.")]
                for stream, batch, shape, dtype in listed
            ],
            "streams": {stream.name: stream.state() for stream in streams},
            "left": model.left,
            "hashes": self._hashes.state(),
        }
        partial = partial_name(self._path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for stale in self._path.parent.glob(f"{self._path.stem}.*.partial"):
                stale.unlink(missing_ok=True)  # of a process that was killed while it wrote
            with partial.open("wb") as file:
                line = json.dumps(header).encode() + b"\n"
                file.write(line)
                sha256 = hashlib.sha256(line)
                for stream, batch, *_ in listed:
                    tensor = states.get(stream, batch).cpu().contiguous()
                    raw = tensor.flatten().view(torch.uint8).numpy().data
                    file.write(raw)
                    sha256.update(raw)
                file.write(sha256.digest())
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path)
        except OSError:
            self._keeps = False
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        self._written = time.monotonic()


def place_of(task: Task, stored: StoredResults, folder: Path) -> tuple[Path, str]:
    """Return where a pass is kept, and what decides its results."""
    kind = "rounded" if task.perturbed else "plain"
    name = f"{slug_of(task.subject.label)}--{kind}-{task.pass_.draw}.kept"
    tasks = (None, *sorted(task.corpus.tasks))
    decides = {s: [stored.identities[s, t].key for t in tasks] for s in sorted(task.streams)}
    rest = [task.compared, task.perturbed, task.pass_.draw]
    return folder / FOLDER / name, digest([decides, *rest])


def kept_pass(task: Task, machine: Machine, feed: Feed, hashes: LinearHashes) -> KeptPass | None:
    if task.resume is None:
        return None
    path, key = task.resume
    shapes = [[list(b.tokens_BT.shape) for b in fed] for fed in (feed.calibration, feed.evaluation)]
    here = [str(machine.device), str(machine.dtype), torch.get_num_threads(), torch.__version__]
    return KeptPass(path, digest([key, shapes, here, machine.column_loop]), hashes)
