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
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from qaudit.checkpoints.adapters import open_checkpoint
from qaudit.checkpoints.safetensors import unread_tensors
from qaudit.checkpoints.stamps import folder_of, own_folder, weights_of
from qaudit.core.registry import parse_merge
from qaudit.core.scheme import Calibration, Scheme, Shipped
from qaudit.engine.batches import TOKENS_PER_BATCH, backwards, make_batches, make_rollout_batches
from qaudit.engine.hidden_states import HiddenStates, share_one_arena
from qaudit.engine.kept_pass import NOT_KEPT, KeptPass
from qaudit.engine.mixing import Scores, table_of
from qaudit.engine.read_out import read_out
from qaudit.engine.routing import REPLAYED, RoutingWatch
from qaudit.engine.shipped import ReferenceStream, ShippedStream, opener, reference_opener
from qaudit.engine.streams import FullPrecision, Observer, SchemeStream, Stream
from qaudit.engine.tally import Tally, timed
from qaudit.engine.tasks import Machine, Task
from qaudit.engine.tokens import REFERENCE, Feed, Openers, Tokens
from qaudit.errors import ModelError, SourceError
from qaudit.formats.weights import QuantizedFolder, quantization_of
from qaudit.model.blocks import Block, BlockModel, ExpertOptions, Weights, self_check
from qaudit.model.config import foreign, is_remote, must_be_one_architecture, ran, read_config
from qaudit.model.device import fits_whole
from qaudit.model.routes import MergedWeights
from qaudit.model.skeleton import load_whole
from qaudit.types import FULL_PRECISION, Checkpoint, Subject

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
    kept: KeptPass = NOT_KEPT,
) -> Mapping[str, Tally]:
    """Send everything through the model once; return a tally for `fp` and for each spec.

    `kept` is where the pass is kept, to go on at a block.
    """
    share_one_arena()
    kinds = {scheme.calibration for scheme in schemes}
    calibrates = bool(kinds - {Calibration.NONE})
    replays = model.experts.replays and model.has_experts
    routes = RoutingWatch(feed.evaluation, replays=replays)
    streams = _computed(schemes, feed, observe, replays=replays, calibrates=calibrates)
    files, unopened = _opened(schemes, model, feed, states, routes)
    streams += files
    if feed.reference is not None and feed.evaluation:
        streams.append(ReferenceStream(feed.reference(model), feed, states))
    tokens = Tokens(model, feed, states, routes)
    if any(scheme.rotates_outputs for scheme in schemes):
        model.prove_rotations()
    tokens.embed(calibration=calibrates)
    if Calibration.WHOLE_BLOCK in kinds:
        tokens.embed_mini_batches()
    scores: Scores = {}
    for stream in streams:
        if isinstance(stream, SchemeStream) and stream.name in feed.tables:
            with timed(model.device, stream.tally):
                stream.take(table_of(stream.name, model, feed, states, progress, scores))
    del scores
    by_name = {stream.name: stream.tally for stream in streams}
    if first := kept.resume(states, streams, model):
        _enter_later(streams, tokens, first)
    for block in model.blocks(first):
        for stream in streams:
            progress(block.index, model.num_blocks, stream.label)
            if stream.tally.error is None:
                is_full = stream is streams[0]
                with timed(model.device, stream.tally), routes.of(stream.tally, is_full=is_full):
                    _through(stream, block, tokens)
        routes.forget()
        tokens.drop_embedded(block.index)
        kept.keep(block.index + 1, states, streams, model)
    states.drop(f"calibration/{FULL_PRECISION}")  # what the last block was learned on
    progress(model.num_blocks, model.num_blocks, "head")
    read_out(tokens, [stream for stream in streams if stream.evaluated])
    tallies = {**by_name, **unopened}
    for scheme in schemes:
        tallies[scheme.spec].note(*([scheme.remark] if scheme.remark else ()), *model.notes_of_left)
        tallies[scheme.spec].note_experts()
        tallies[scheme.spec].note(*([REPLAYED] if replays else ()))
    return tallies


def _computed(
    schemes: Sequence[Scheme], feed: Feed, observe: Observer, *, replays: bool, calibrates: bool
) -> list[Stream]:
    """Return full precision and every scheme; first what the others are compared with."""
    kinds = {scheme.calibration for scheme in schemes}
    compared, routes = feed.compared and bool(schemes), replays and calibrates
    full = FullPrecision(
        evaluated=feed.full_precision or ((compared or replays) and not feed.perturbed),
        captures=Calibration.FULL_PRECISION in kinds,
        lends=Calibration.BOTH_STREAMS in kinds,
        teaches=Calibration.WHOLE_BLOCK in kinds,
        surrounds=any(scheme.compares_modules for scheme in schemes),
        routes=routes,
    )
    computed = [scheme for scheme in schemes if not isinstance(scheme, Shipped)]
    streams: list[Stream] = [full, *(SchemeStream(scheme, full, observe) for scheme in computed)]
    if feed.perturbed and (feed.compared or replays):
        streams.insert(0, FullPrecision(evaluated=True, routes=routes, name=REFERENCE))
    return streams


def _opened(
    schemes: Sequence[Scheme],
    model: BlockModel,
    feed: Feed,
    states: HiddenStates,
    routes: RoutingWatch,
) -> tuple[list[ShippedStream], dict[str, Tally]]:
    """Return the streams of quantized files, and the tallies of those that cannot be opened."""
    streams: list[ShippedStream] = []
    unopened: dict[str, Tally] = {}
    for scheme in schemes:
        if isinstance(scheme, Shipped):
            try:
                opened = feed.shipped[scheme.spec](model)
            except SourceError as error:
                unopened[scheme.spec] = Tally(error=error)
            else:
                streams.append(ShippedStream(scheme, opened, feed, states, routes))
    return streams, unopened


def _enter_later(streams: Sequence[Stream], tokens: Tokens, first: int) -> None:
    """Let every model note what its blocks are called with, and begin behind some of them."""
    tokens.drop_embedded(first - 1)
    for stream in streams:
        if (beside := stream.tokens(tokens)) is not tokens:
            beside.embed(calibration=False)
            beside.drop_embedded(first - 1)


def _through(stream: Stream, block: Block, tokens: Tokens) -> None:
    """Send a stream through a block; a file that cannot be read ends its own stream alone."""
    try:
        with tokens.routes.watched(block):
            entered = stream.enter(block, tokens)
        if stream.evaluated:
            with tokens.routes.watched(entered):
                stream.tokens(tokens).evaluate(stream.name, entered)
        stream.leave(block)
    except SourceError as error:
        if not isinstance(stream, ShippedStream):
            raise
        stream.fail(error)
        stream.leave(block)


_EXPERTS_WITHIN = {2: 2e-2, 4: 1e-5, 8: 1e-12}
"""How far logits may be from the whole model's where there are experts, by bytes of a number."""


@dataclass(frozen=True, eq=False)
class Route:
    """How one subject's weights are run."""

    folder: Path
    weights: Weights
    dtype: torch.dtype
    device: torch.device
    trust_remote_code: bool = False
    experts: ExpertOptions = field(default_factory=ExpertOptions)

    def follow(
        self,
        feed: Feed,
        schemes: Sequence[Scheme],
        states: HiddenStates,
        progress: Progress,
        observe: Observer,
        kept: KeptPass = NOT_KEPT,
    ) -> Mapping[str, Tally]:
        self._check_vocabulary(feed)
        remote = is_remote(self.folder)
        with foreign(self.folder, "while it is measured") if remote else nullcontext():
            model, notes = self.streamed()
            tallies = run_blocks(model, feed, schemes, states, progress, observe, kept)
        tallies[FULL_PRECISION].note(*notes, *model.notes)
        if remote:
            for tally in tallies.values():
                tally.note(ran(self.folder))
        return tallies

    def _check_vocabulary(self, feed: Feed) -> None:
        """Refuse text cut by the tokenizer of a model with more tokens than this one."""
        batches = (*feed.calibration, *feed.evaluation)
        highest = max((int(batch.tokens_BT.max()) for batch in batches), default=0)
        config = read_config(self.folder, trust_remote_code=self.trust_remote_code)
        vocabulary = int(getattr(config.get_text_config(), "vocab_size", None) or highest + 1)
        if highest >= vocabulary:
            raise ModelError(
                f"the model in `{self.folder}` knows {vocabulary} tokens, "
                f"and its tokenizer makes token {highest}",
                hint="take the tokenizer that belongs to the model",
            )

    def streamed(self) -> tuple[BlockModel, tuple[str, ...]]:
        """Return the model as blocks, and notes of its check."""
        trusted = self.trust_remote_code
        fits = fits_whole(self.weights, self.dtype, self.device)
        if is_remote(self.folder) and not fits:
            raise ModelError(
                f"the model in `{self.folder}` is code of its own, with which its blocks are "
                "compared, and does not fit in memory as a whole",
                hint="use a machine with more memory",
            )
        model = BlockModel(
            self.folder,
            self.weights,
            dtype=self.dtype,
            device=self.device,
            trust_remote_code=trusted,
            experts=self.experts,
        )
        if model.is_streamable and not is_remote(self.folder):
            return model, ()
        if not fits:
            raise ModelError(
                f"`{model.model_type}` is not a family this engine is tested on, and the whole "
                "model does not fit in memory to check it",
                hint="use a machine with more memory, or `--device` with a larger one",
            )
        whole = load_whole(self.folder, self.weights, self.dtype, trust_remote_code=trusted)
        compared = self_check(model, whole)
        # The library's kernels for experts are others than a product for each.
        close = model.has_experts and compared.difference <= _EXPERTS_WITHIN[self.dtype.itemsize]
        if not (compared.equal or close):
            raise ModelError(
                f"the blocks of a `{model.model_type}`, run one at a time, give other logits than "
                f"the whole model, by {compared.difference:.1e} of the largest",
                hint="only models that run block by block can be audited",
            )
        return model, (compared.note,)


def open_weights(
    subject: Subject, *, allow_pickle: bool, folder: Callable[[Checkpoint], Path] = own_folder
) -> Weights:
    """Open a subject's weights: a checkpoint's as they are, a soup's merged as they are read."""
    places = [folder(checkpoint) for checkpoint, _ in subject.members]
    if subject.merge is None and not subject.first.is_adapter and quantization_of(places[0]):
        return QuantizedFolder(places[0])
    without = unread_tensors(places, [checkpoint for checkpoint, _ in subject.members])
    members = [
        open_checkpoint(checkpoint, allow_pickle=allow_pickle, folder=folder, without=without)
        for checkpoint, _ in subject.members
    ]
    if subject.merge is None:
        return members[0]
    labels = [checkpoint.label for checkpoint, _ in subject.members]
    shares = [share for _, share in subject.members]
    merged = MergedWeights(labels, members, shares, parse_merge(subject.merge))
    must_be_one_architecture(labels, [folder_of(checkpoint) for checkpoint, _ in subject.members])
    return merged


def route_of(task: Task, weights: Weights, machine: Machine) -> Route:
    """Return how a task's weights are run."""
    return Route(
        folder_of(task.subject.first),
        weights,
        machine.dtype,
        machine.device,
        trust_remote_code=machine.trust_remote_code,
        experts=machine.experts,
    )


@contextmanager
def opened_states(machine: Machine) -> Iterator[HiddenStates]:
    """Hold hidden states for one pass."""
    with (
        tempfile.TemporaryDirectory(prefix="qaudit-") as spill,
        HiddenStates(
            Path(spill),
            machine.stream_limit_nbytes,
            machine.device,
            machine.device_stream_limit_nbytes,
        ) as states,
    ):
        yield states


def feed_of(task: Task) -> Feed:
    """Return the batches of a pass; of one that rounds otherwise, smaller and in reverse."""
    corpus, context, limit = task.corpus, task.corpus.protocol.context, task.pad_until
    scored, half = corpus.evaluation, TOKENS_PER_BATCH // 2
    if not task.perturbed:
        documents = make_batches(scored, context, pad_until=limit)
        return Feed(
            make_batches(corpus.calibration, context, pad_until=limit),
            (*documents, *make_rollout_batches(corpus, pad_until=limit)),
            full_precision=task.pass_.full_precision,
            compared=task.compared,
            items=corpus.windows_by_task,
        )
    return Feed(
        calibration=backwards(make_batches(corpus.calibration, context, half, limit)),
        evaluation=make_batches(scored, context, half, limit),
        full_precision=task.pass_.full_precision,
        compared=task.compared,
        perturbed=True,
    )


def openers_of(task: Task, weights: Weights) -> Openers:
    """Return a function that opens each shipped file of a task."""
    names, base = frozenset(weights.names()), folder_of(task.subject.first)
    places = {
        shipped.label: weights_of(shipped, task.folder(shipped)) for shipped in task.pass_.shipped
    }
    return {
        scheme.spec: opener(scheme, places[scheme.file], base, names)
        for scheme in task.schemes
        if isinstance(scheme, Shipped)
    }


def reference_of(task: Task, machine: Machine) -> Callable[[BlockModel], BlockModel] | None:
    """Return a function that opens the reference beside a model, where a pass has one."""
    subject = task.pass_.reference
    if subject is None:
        return None
    return reference_opener(
        subject.label,
        folder_of(subject.first) if subject.first.base else task.folder(subject.first),
        partial(open_weights, subject, allow_pickle=machine.allow_pickle, folder=task.folder),
        trust_remote_code=machine.trust_remote_code,
    )
