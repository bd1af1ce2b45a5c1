"""One subject, once through its blocks, all streams side by side.

    embed -> for each block: [ full precision | scheme | scheme | ... ] -> one read-out

A block's tensors are read once. Each stream in turn makes the block's linears what they are for
it, and sends its evaluation tokens through. The read-out walks batch by batch over all streams.
No quantized model ever exists as a whole, and none is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from qaudit.core.scheme import Calibration, Scheme
from qaudit.engine.batches import Batch
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.streams import (
    Feed,
    FullPrecision,
    Observer,
    SchemeStream,
    Stream,
    Tally,
    Tokens,
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
    full = FullPrecision(
        evaluated=feed.full_precision, captures=Calibration.FULL_PRECISION in kinds
    )
    streams: list[Stream] = [full, *(SchemeStream(one, full, observe) for one in schemes)]
    tokens = Tokens(model, feed, states)
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
    for scheme, stream in zip(schemes, streams[1:], strict=True):
        stream.tally.note(*([scheme.remark] if scheme.remark else ()))
    return {stream.name: stream.tally for stream in streams}


def read_out(tokens: Tokens, streams: Sequence[Stream]) -> None:
    """Turn hidden states into losses per token, batch by batch over all streams."""
    for k, batch in enumerate(tokens.feed.evaluation):
        for stream in streams:
            with timed(stream.tally, tokens.model.device):
                hidden_BTD = tokens.states.get(f"evaluation/{stream.name}", k)
                stream.tally.nll.append(tokens.model.nll(hidden_BTD, batch.tokens_BT).cpu())
    for stream in streams:
        tokens.states.drop(f"evaluation/{stream.name}")


@contextmanager
def timed(tally: Tally, device: torch.device) -> Iterator[None]:
    """Add the seconds of a `with` body to a tally."""
    began = time.perf_counter()
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        tally.seconds += time.perf_counter() - began


def document_sums(
    batches: Sequence[Batch], nll: Sequence[Tensor], windows: Sequence[tuple[int, int]], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sum losses and scored tokens over documents; `windows` holds (document, scored_from)."""
    sums, tokens = np.zeros(count), np.zeros(count, dtype=np.int64)
    for batch, nll_BT in zip(batches, nll, strict=True):
        for row, (w, length) in enumerate(zip(batch.windows, batch.lengths, strict=True)):
            document, scored_from = windows[w]
            sums[document] += float(nll_BT[row, scored_from:length].double().sum())
            tokens[document] += length - scored_from
    return sums, tokens
