"""The one read-out: hidden states become losses, and divergences from full precision.

It walks batch by batch and chunk by chunk over all streams: full precision's logits of a chunk
are made once, every stream's are compared with them, and none are stored. A stream that cannot
be compared has its losses all the same, and a note that names the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qaudit.core.fidelity import ComparedRows, Reference, losses, output_error
from qaudit.engine.batches import Batch
from qaudit.engine.reference import ReferenceStream
from qaudit.engine.streams import Stream
from qaudit.engine.tally import Tally, timed
from qaudit.engine.tokens import Tokens


def read_out(tokens: Tokens, streams: Sequence[Stream]) -> None:
    """Add losses and divergences per token to the tally of every stream.

    The first is what the others are compared with, and all with the reference, if there is one.
    """
    for k, batch in enumerate(tokens.feed.evaluation):
        _read_batch(tokens, streams, k, batch)
    for stream in streams:
        tokens.states.drop(f"evaluation/{stream.name}")
        with timed(stream.tally, tokens.model.device):
            stream.tokens(tokens).items.read_out(stream.name, stream.tally)


def _read_batch(tokens: Tokens, streams: Sequence[Stream], k: int, batch: Batch) -> None:
    model = tokens.model
    targets_N = batch.tokens_BT[:, 1:].reshape(-1).to(model.device, torch.long)
    hidden: list[Tensor] = []
    for stream in streams:
        with timed(stream.tally, model.device):
            hidden_BTD = tokens.states.get(f"evaluation/{stream.name}", k)
            hidden.append(hidden_BTD[:, :-1].reshape(-1, hidden_BTD.shape[-1]))
    compared = tokens.feed.compared and len(streams) > 1
    chunks: list[list[ComparedRows]] = [[] for _ in streams]
    beside: list[list[ComparedRows]] = [[] for _ in streams]
    of_reference = next((s for s in streams if isinstance(s, ReferenceStream)), None)
    for first in range(0, len(targets_N), model.head_rows):
        part = slice(first, first + model.head_rows)
        reference: Reference | None = None
        yardstick: Reference | None = None
        if of_reference is not None:
            with timed(of_reference.tally, model.device):
                place = streams.index(of_reference)
                logits_NV = of_reference.tokens(tokens).model.logits(hidden[place][None, part])[0]
                yardstick = Reference.of(logits_NV, targets_N[part])
        for stream, hidden_ND, read, other in zip(streams, hidden, chunks, beside, strict=True):
            with timed(stream.tally, model.device):
                if stream is of_reference and yardstick is not None:
                    logits_NV, rows = yardstick.logits_NV, yardstick.rows
                    read.append(chosen(batch, part, rows, logits_NV, targets_N[part]))
                    continue
                stream_model = stream.tokens(tokens).model
                logits_NV = stream_model.logits(hidden_ND[None, part])[0]
                if stream is streams[0] and compared:
                    reference = Reference.of(logits_NV, targets_N[part])
                    rows = reference.rows
                else:
                    rows = rows_of(stream.tally, reference, logits_NV, targets_N[part])
                    error_N = output_error(hidden[0][part], hidden_ND[part]) if compared else None
                    rows = replace(rows, output_error_N=error_N)
                wrote = stream is streams[0]
                rows = chosen(batch, part, rows, logits_NV, targets_N[part], wrote=wrote)
                read.append(rows)
                if yardstick is not None:
                    other.append(rows_of(stream.tally, yardstick, logits_NV, targets_N[part]))
    for stream, read, other in zip(streams, chunks, beside, strict=True):
        stream.tally.read((batch.tokens_BT.shape[0], batch.tokens_BT.shape[1]), read, other)


def chosen(
    batch: Batch,
    part: slice,
    rows: ComparedRows,
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    wrote: bool = False,
) -> ComparedRows:
    """Return a part of a batch's rows; of rollouts, with what a stream would choose itself."""
    if batch.choices is None or batch.drawn_BT is None:
        return rows
    drawn_S = batch.drawn_BT[:, 1:].reshape(-1)[part].nonzero().squeeze(1)
    return rows.with_choices(logits_NV, targets_N, batch.choices, drawn_S, wrote=wrote)


def rows_of(
    tally: Tally, reference: Reference | None, logits_NV: Tensor, targets_N: Tensor
) -> ComparedRows:
    """Return a stream's rows, compared with full precision's where that is possible."""
    if reference is None:
        return ComparedRows(losses(logits_NV, targets_N))
    known, vocabulary = reference.logits_NV.shape[1], logits_NV.shape[1]
    if vocabulary == known:
        return reference.compare(logits_NV, targets_N)
    tally.note(
        f"KL divergence is not measured: its vocabulary is {vocabulary} tokens, "
        f"that of full precision {known}"
    )
    return ComparedRows(losses(logits_NV, targets_N))
