"""A block of the engine, as a scheme that learns on its output sees it.

Mini-batches are windows by falling length, so many that they hold `STEP_TOKENS`. Which windows are
together depends on the calibration text alone: a perturbed pass, whose batches are others, learns
on the same ones in the same order, and what it finds is what rounding is worth. What earlier blocks
left beside hidden states goes along as further columns of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from qaudit.core.linears import Linears
from qaudit.core.whole_block import STEP_TOKENS, MiniBatch, WholeBlock
from qaudit.engine.batches import Batch, padded
from qaudit.model.beside import WideRows
from qaudit.model.blocks import Block
from qaudit.model.tape import Shape

ReadBatch = Callable[[int], Tensor]
"""Return the hidden states of a calibration batch."""


@dataclass(frozen=True)
class _Place:
    """Where a window of a mini-batch is."""

    batch: int
    row: int
    length: int
    width: int  # of a batch in which it is the longest
    pads: bool


def whole_block(
    block: Block,
    batches: Sequence[Batch],
    own: ReadBatch,
    full: ReadBatch,
    calibrated: Callable[[], tuple[Linears, ...]],
) -> WholeBlock:
    rows = WideRows.of(own(0))
    return WholeBlock(
        groups=tuple(map(block.linears, block.groups)),
        batches=_MiniBatches(_cut(batches), lambda k: rows.join(own(k)), full),
        calibrated=calibrated,
        run=lambda x_BTC, quantized: block.run_as(rows.split(x_BTC), quantized),
    )


def shapes(batches: Sequence[Batch]) -> set[Shape]:
    """Return the shapes of mini-batches, which must have been embedded."""
    return {(len(places), places[0].width) for places in _cut(batches)}


def _cut(batches: Sequence[Batch]) -> list[tuple[_Place, ...]]:
    windows = []
    for k, batch in enumerate(batches):
        widest = batch.tokens_BT.shape[1]
        for row, (window, length) in enumerate(zip(batch.windows, batch.lengths, strict=True)):
            width = padded(length, widest) if batch.pads else length
            place = _Place(k, row, length, width, batch.pads)
            windows.append((-length, window, place))
    ordered = [place for *_, place in sorted(windows, key=lambda one: one[:2])]
    cut = []
    while ordered:
        places = ordered[: max(1, STEP_TOKENS // ordered[0].width)]
        if not ordered[0].pads:
            places = [place for place in places if place.width == ordered[0].width]
        cut.append(tuple(places))
        del ordered[: len(places)]
    return cut


@dataclass(frozen=True, eq=False)
class _MiniBatches(Sequence[MiniBatch]):
    """Mini-batches, of which those that are asked for are in memory."""

    places: list[tuple[_Place, ...]]
    own: ReadBatch
    full: ReadBatch

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> MiniBatch: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[MiniBatch]: ...

    def __getitem__(self, index: int | slice) -> MiniBatch | Sequence[MiniBatch]:
        if isinstance(index, slice):
            return _MiniBatches(self.places[index], self.own, self.full)
        places = self.places[index]
        width = places[0].width
        own_BTD, full_BTD = (_rows(places, width, read) for read in (self.own, self.full))
        lengths_B = torch.tensor([place.length for place in places], device=own_BTD.device)
        positions_T = torch.arange(width, device=own_BTD.device)
        return MiniBatch(own_BTD, full_BTD, positions_T < lengths_B[:, None])

    def __iter__(self) -> Iterator[MiniBatch]:
        return (self[k] for k in range(len(self)))


def _rows(places: Sequence[_Place], width: int, read: ReadBatch) -> Tensor:
    """Return windows side by side; what is behind the end of one is padding."""
    batches = {k: read(k) for k in sorted({place.batch for place in places})}
    rows = [batches[place.batch][place.row, :width] for place in places]
    return torch.stack([pad(row_TD, (0, 0, 0, width - len(row_TD))) for row_TD in rows])
