"""One subject, once through its blocks, all streams side by side.

    embed -> for each block: [ full precision | scheme | scheme | ... ] -> one read-out

A block's tensors are read once. Each stream in turn makes the block's linears what they are for
it, and sends its evaluation tokens through. The read-out walks batch by batch over all streams.
No quantized model ever exists as a whole, and none is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from qaudit.core.scheme import Calibration, Scheme
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.item_stream import ItemStream
from qaudit.engine.read_out import read_out
from qaudit.engine.streams import (
    REFERENCE,
    Feed,
    FullPrecision,
    Observer,
    SchemeStream,
    Stream,
    Tally,
    Tokens,
    timed,
)
from qaudit.model.allocator import share_one_arena
from qaudit.model.blocks import BlockModel

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
) -> Mapping[str, Tally]:
    """Send everything through the model once; return a tally for `fp` and for each spec."""
    share_one_arena()
    kinds = {scheme.calibration for scheme in schemes}
    compared = feed.compared and bool(schemes)
    full = FullPrecision(
        evaluated=feed.full_precision or (compared and not feed.perturbed),
        captures=Calibration.FULL_PRECISION in kinds,
    )
    streams: list[Stream] = [full, *(SchemeStream(one, full, observe) for one in schemes)]
    if feed.perturbed and feed.compared:
        streams.insert(0, FullPrecision(evaluated=True, captures=False, name=REFERENCE))
    tokens = Tokens(model, feed, states, ItemStream(model, feed.items, states))
    tokens.embed(calibration=bool(kinds - {Calibration.NONE}))
    for block in model.blocks():
        for stream in streams:
            progress(block.index, model.num_blocks, stream.label)
            with timed(stream.tally, model.device):
                stream.enter(block, tokens)
                if stream.evaluated:
                    tokens.evaluate(stream.name, block)
                block.restore()
        if block.index == 0:
            tokens.drop_embedded()
    progress(model.num_blocks, model.num_blocks, "head")
    read_out(tokens, [stream for stream in streams if stream.evaluated])
    tallies = {stream.name: stream.tally for stream in streams}
    for scheme in schemes:
        tallies[scheme.spec].note(*([scheme.remark] if scheme.remark else ()))
    return tallies
