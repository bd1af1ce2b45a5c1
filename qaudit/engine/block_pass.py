"""One subject, once through its blocks, all streams side by side.

    embed -> for each block: [ full precision | scheme | scheme | ... ] -> one read-out

A block's tensors are read once. Each stream in turn makes the block's linears what they are for
it, and sends its evaluation tokens through. The read-out walks batch by batch over all streams.
No quantized model ever exists as a whole, and none is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from qaudit.core.scheme import Calibration, Scheme, Shipped
from qaudit.engine.hidden_states import HiddenStates, share_one_arena
from qaudit.engine.items import ItemStream
from qaudit.engine.kept_pass import NOT_KEPT, KeptPass
from qaudit.engine.mixing import table_of
from qaudit.engine.read_out import read_out
from qaudit.engine.routing import REPLAYED, RoutingWatch
from qaudit.engine.shipped import ReferenceStream, ShippedStream
from qaudit.engine.streams import FullPrecision, Observer, SchemeStream, Stream
from qaudit.engine.tally import Tally, timed
from qaudit.engine.tokens import REFERENCE, Feed, Tokens
from qaudit.errors import SourceError
from qaudit.model.blocks import Block, BlockModel
from qaudit.types import FULL_PRECISION

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
    tokens = Tokens(model, feed, states, ItemStream(model, feed.items, states, routes), routes)
    if any(scheme.rotates_outputs for scheme in schemes):
        model.prove_rotations()
    tokens.embed(calibration=calibrates)
    if Calibration.WHOLE_BLOCK in kinds:
        tokens.embed_mini_batches()
    for stream in streams:
        if isinstance(stream, SchemeStream) and stream.name in feed.tables:
            with timed(model.device, stream.tally):
                stream.take(table_of(stream.name, model, feed, states, progress))
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
        tallies[scheme.spec].note_experts(model.experts)
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
