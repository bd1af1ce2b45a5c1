"""The one read-out: hidden states become losses, and divergences from full precision.

It walks batch by batch and chunk by chunk over all streams: full precision's logits of a chunk
are made once, every stream's are compared with them, and none are stored. Streams of one model go
through its head together, as many rows in all as one of them would alone. Then they are compared
a few rows at a time, stream after stream: full precision's probabilities of these rows stay in a
core's cache. Results go into tensors of the whole batch: small ones that outlive logits would lie
between them in the heap, which would take new memory for every chunk. A stream that cannot be
compared has its losses all the same, and a note that names the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qaudit.core.fidelity import ComparedRows, Reference, losses, output_error, row_parts
from qaudit.engine.batches import Batch
from qaudit.engine.shipped import ReferenceStream
from qaudit.engine.streams import Stream
from qaudit.engine.tally import Tally, timed
from qaudit.engine.tokens import Tokens
from qaudit.model.blocks import BlockModel
from qaudit.model.device import Copies, HostCopy


def read_out(tokens: Tokens, streams: Sequence[Stream]) -> None:
    """Add losses and divergences per token to the tally of every stream.

    The first is what the others are compared with, and all with the reference, if there is one.
    """
    model, copies = tokens.model, Copies(tokens.model.device)
    batches = []
    for k, batch in enumerate(tokens.feed.evaluation):
        read = _read_batch(tokens, streams, k, batch)
        named = [rows for stream in read for rows in (stream.rows, stream.from_reference)]
        batches.append((batch, _copied(named, copies)))
    for batch, copied in batches:
        windows, length = batch.tokens_BT.shape
        rows = copied()
        for stream in streams:
            stream.tally.read((windows, length), next(rows), next(rows))
    for stream in streams:
        tokens.states.drop(f"evaluation/{stream.name}")
        if (of_stream := stream.tokens(tokens)).items:
            with timed(model.device, stream.tally):
                stream.tally.options = of_stream.item_losses(stream.name)


def _copied(
    named: list[dict[str, Tensor]], copies: Copies
) -> Callable[[], Iterator[dict[str, Tensor]]]:
    """Send results to the host, in one copy for which a GPU is not waited for; return its reader.

    Values of rows, a column of them or several, go as rows of float32.
    """
    kinds = [{name: (v_N.shape, v_N.dtype) for name, v_N in rows.items()} for rows in named]
    values = (v_N for rows in named for v_N in rows.values())
    columns = [v_N.reshape(len(v_N), v_N.shape[1:].numel()).T.float() for v_N in values]
    copy = copies.to_host(torch.cat(columns)) if columns else HostCopy(torch.zeros(0))

    def read() -> Iterator[dict[str, Tensor]]:
        first = 0
        for kinds_of_rows in kinds:
            rows: dict[str, Tensor] = {}
            for name, (shape, dtype) in kinds_of_rows.items():
                behind = first + shape[1:].numel()
                rows[name] = copy.read()[first:behind].T.reshape(shape).to(dtype)
                first = behind
            yield rows

    return read


def _read_batch(
    tokens: Tokens, streams: Sequence[Stream], k: int, batch: Batch
) -> list[_StreamRows]:
    model = tokens.model
    targets_N = batch.tokens_BT[:, 1:].reshape(-1).to(model.device, torch.long)
    readings = []
    for stream in streams:
        with timed(model.device, stream.tally):
            hidden_BTD = tokens.states.get(f"evaluation/{stream.name}", k)
            hidden_ND = hidden_BTD[:, :-1].reshape(-1, hidden_BTD.shape[-1])
            readings.append(_StreamRows(stream, hidden_ND))
    groups: dict[BlockModel, list[_StreamRows]] = {}
    # The reference comes first: all streams are compared with it.
    for reading in sorted(readings, key=lambda r: not isinstance(r.stream, ReferenceStream)):
        groups.setdefault(reading.stream.tokens(tokens).model, []).append(reading)
    full = readings[0] if tokens.feed.compared and len(streams) > 1 else None
    step = max(2, model.head_rows // max(map(len, groups.values())))
    for first in range(0, len(targets_N), step):
        chunk = slice(first, min(first + step, len(targets_N)))
        parts: list[_RowPart] = []
        for group_model, group in groups.items():
            with timed(model.device, *(reading.stream.tally for reading in group)):
                hidden_ND = torch.cat([reading.hidden_ND[chunk] for reading in group])
                logits = group_model.logits(hidden_ND[None])[0].chunk(len(group))
            parts = parts or [
                _RowPart(batch, targets_N, full, chunk.start, rows) for rows in row_parts(logits[0])
            ]
            for part in parts:
                for reading, logits_NV in zip(group, logits, strict=True):
                    with timed(model.device, reading.stream.tally):
                        part.read(reading, logits_NV, wrote=reading is readings[0])
                if len(groups) == 1:
                    part.reference = None  # its memory is that of the next part
    return readings


@dataclass(frozen=True, eq=False)
class _StreamRows:
    """A batch of a stream: what its last block returned, and the rows that came of it."""

    stream: Stream
    hidden_ND: Tensor
    rows: dict[str, Tensor] = field(default_factory=dict)  # of the batch, as in `ComparedRows`
    from_reference: dict[str, Tensor] = field(default_factory=dict)  # compared with the reference

    def add(self, rows: dict[str, Tensor], place: slice, part: ComparedRows) -> None:
        """Add results of some rows to those of the batch."""
        for name, values in vars(part).items():
            if values is not None:
                if name not in rows:
                    rows[name] = values.new_empty(len(self.hidden_ND), *values.shape[1:])
                rows[name][place] = values


@dataclass(eq=False)
class _RowPart:
    """Some rows of all streams, and what they are compared with."""

    batch: Batch
    targets_N: Tensor  # of the batch
    full: _StreamRows | None  # what is compared with, if anything is
    start: int  # of the chunk in the batch
    rows: slice  # of the chunk
    reference: Reference | None = None  # full precision's rows
    yardstick: Reference | None = None  # the reference's

    def read(self, reading: _StreamRows, logits_NV: Tensor, *, wrote: bool) -> None:
        """Add these rows to those of a stream."""
        place = slice(self.start + self.rows.start, self.start + self.rows.stop)
        logits_NV, targets_N = logits_NV[self.rows], self.targets_N[place]
        tally, full = reading.stream.tally, self.full
        if isinstance(reading.stream, ReferenceStream):
            self.yardstick = Reference.of(logits_NV, targets_N)
            rows = self.yardstick.rows
        else:
            if reading is full:
                self.reference = Reference.of(logits_NV, targets_N)
                rows = self.reference.rows
            else:
                rows = rows_of(tally, self.reference, logits_NV, targets_N)
                if full is not None:
                    error_N = output_error(full.hidden_ND[place], reading.hidden_ND[place])
                    rows = replace(rows, output_error_N=error_N)
            if self.yardstick is not None:
                compared = rows_of(tally, self.yardstick, logits_NV, targets_N)
                reading.add(reading.from_reference, place, compared)
        batch = self.batch
        if batch.choices is not None and batch.drawn_BT is not None:  # what it would choose itself
            drawn_S = batch.drawn_BT[:, 1:].reshape(-1)[place].nonzero().squeeze(1)
            rows = rows.with_choices(logits_NV, targets_N, batch.choices, drawn_S, wrote=wrote)
        reading.add(reading.rows, place, rows)


def rows_of(
    tally: Tally, reference: Reference | None, logits_NV: Tensor, targets_N: Tensor
) -> ComparedRows:
    """Return a stream's rows, compared with full precision's where that is possible."""
    if reference is not None:
        full, vocabulary = reference.logits_NV.shape[1], logits_NV.shape[1]
        if vocabulary == full:
            return reference.compare(logits_NV, targets_N)
        tally.note(
            f"KL divergence is not measured: its vocabulary is {vocabulary} tokens, "
            f"that of full precision {full}"
        )
    return ComparedRows(losses(logits_NV, targets_N))
