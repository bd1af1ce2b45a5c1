"""What goes through the blocks, and where the hidden states of every stream are between two.

A change as small as the arithmetic makes: what rounding in one block is worth.

What GPTQ and AWQ store depends on which way a sum was rounded, and another device, library or
number of threads rounds otherwise, in every block. A perturbed pass stands for them. Batches are
others, and two things move up or down by a fixed pattern:

- every hidden state that enters a block, by 4 units in the last place of float32, or 1 of a half
  type. On the demo, rounding in one block made 1.8 to 2.7 and 0.43 to 0.52 of the norm, float64
  being the reference.
- every entry of the Gram matrices of calibration inputs, by 4 units in the last place of what it
  is at most, sqrt(h_ii h_jj): the backward error of a float32 sum and of a Cholesky factorization
  (Higham, Accuracy and Stability of Numerical Algorithms, chapters 3 and 10).

By one unit, a code turned over in one of four measurements on the demo, and the losses of the
others moved by 1e-8: a single subject did not show what can happen.

A block of the engine, as a scheme that learns on its output sees it.

Mini-batches are windows by falling length, so many that they hold `STEP_TOKENS`. Which windows are
together depends on the calibration text alone: a perturbed pass, whose batches are others, learns
on the same ones in the same order, and what it finds is what rounding is worth. What earlier blocks
left beside hidden states goes along as further columns of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from qaudit.core.linears import STEP_TOKENS, Inputs, Linears, MiniBatch, Quantized, WholeBlock
from qaudit.engine.batches import Batch, ItemBatch, make_item_batches, padded
from qaudit.engine.gathering import capture_inputs
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.tally import RoutingWatch
from qaudit.formats.weights import QuantizedWeights
from qaudit.model.blocks import Block, BlockModel, Group
from qaudit.model.links import Arguments, WideRows, beside, leave
from qaudit.planning.machine import MASKS_NBYTES, waiting_nbytes
from qaudit.types import FULL_PRECISION, Window

_UNITS = {2: 1, 4: 4, 8: 4}  # by bytes of a value
_EPSILON = 2.0**-23  # of float32, in which Gram matrices are summed
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def perturbed(values: Tensor, pattern: int) -> Tensor:
    """Return values some units in the last place away; zeros and what is not finite stay.

    Blocks have patterns of their own: errors by one that repeats would add up.
    """
    steps = _UNITS[values.element_size()] * _signs(values.shape, pattern)
    bits = values.view(_BITS[values.element_size()])
    moved = (bits + steps.to(bits)).view(values.dtype)
    return torch.where(torch.isfinite(values) & (values != 0), moved, values)


def perturbed_inputs(inputs: Inputs, pattern: int) -> Inputs:
    """Return inputs with another Gram matrix, symmetric as well, and a drift as much changed."""
    gram_CC = inputs.gram_CC
    scale_C = _UNITS[4] ** 0.5 * gram_CC.diagonal().sqrt()
    steps_CC = torch.triu(_signs(gram_CC.shape, pattern)).to(gram_CC)
    steps_CC += torch.triu(steps_CC, 1).T
    change_CC = _EPSILON * steps_CC * scale_C * scale_C[:, None]
    drift_CC = None if inputs.drift_CC is None else inputs.drift_CC + change_CC
    return replace(inputs, gram_CC=gram_CC + change_CC, drift_CC=drift_CC)


def _signs(shape: torch.Size, pattern: int) -> Tensor:
    """Return -1 and 1 by a fixed pattern, made on the host: it is the same on every device."""
    generator = torch.Generator().manual_seed(pattern)
    return 2 * torch.randint(0, 2, shape, generator=generator) - 1


ReadBatch = Callable[[int], Tensor]
"""Return the hidden states of a calibration batch."""


class _Place(NamedTuple):
    """Where a window of a mini-batch is."""

    batch: int
    row: int
    length: int
    width: int  # of a batch in which it is the longest
    pads: bool


def _cut(batches: Sequence[Batch]) -> list[list[_Place]]:
    windows = []
    for k, batch in enumerate(batches):
        widest = batch.tokens_BT.shape[1]
        for row, (window, length) in enumerate(zip(batch.windows, batch.lengths, strict=True)):
            width = padded(length, widest) if batch.pads else length
            windows.append((-length, window, _Place(k, row, length, width, batch.pads)))
    ordered = [place for *_, place in sorted(windows)]
    cut = []
    while ordered:
        places = ordered[: max(1, STEP_TOKENS // ordered[0].width)]
        if not ordered[0].pads:
            places = [place for place in places if place.width == ordered[0].width]
        cut.append(places)
        del ordered[: len(places)]
    return cut


class _MiniBatches(Sequence[MiniBatch]):
    """Mini-batches, of which those that are asked for are in memory."""

    def __init__(self, places: list[list[_Place]], *read: ReadBatch) -> None:
        """`read` returns a batch of the stream itself, and of full precision behind the block."""
        self._places, self._read = places, read

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        places, width = self._places[index], self._places[index][0].width
        side_by_side = []
        for read in self._read:
            batches = {k: read(k) for k in sorted({place.batch for place in places})}
            rows = [batches[place.batch][place.row, :width] for place in places]
            # What is behind the end of a window is padding.
            rows = [pad(row_TD, (0, 0, 0, width - len(row_TD))) for row_TD in rows]
            side_by_side.append(torch.stack(rows))
        own_BTD, full_BTD = side_by_side
        lengths_B = torch.tensor([place.length for place in places], device=own_BTD.device)
        positions_T = torch.arange(width, device=own_BTD.device)
        return MiniBatch(own_BTD, full_BTD, positions_T < lengths_B[:, None])


_PARTS = ("calibration", "evaluation", "items")
Floats = npt.NDArray[np.float64]
Marks = npt.NDArray[np.bool_]

REFERENCE = "unperturbed"
"""Full precision as it is beside perturbed streams, which are compared with it."""


@dataclass(frozen=True, eq=False)
class Feed:
    """What goes through: batches for calibration and for evaluation, and options of items."""

    calibration: Sequence[Batch]
    evaluation: Sequence[Batch]
    full_precision: bool = True  # whether the model as it is becomes a measurement, too
    compared: bool = True  # whether schemes are compared with it, for which it is evaluated anyway
    perturbed: bool = False  # whether it is computed otherwise, as far as rounding goes
    items: Sequence[Sequence[Window]] = ()  # by tasks, each of which is batched by itself
    # What opens each quantized file beside the model of its base, by canonical form.
    shipped: Mapping[str, Callable[[BlockModel], tuple[BlockModel, QuantizedWeights]]] = field(
        default_factory=dict
    )
    reference: Callable[[BlockModel], BlockModel] | None = None  # opens the model of another
    column_loop: str = "plain"  # how GPTQ's columns are rounded
    tables: Mapping[str, Path] = field(default_factory=dict)  # files of mixtures' bits, by spec


class Tokens:
    """Where the hidden states of every stream are between blocks."""

    def __init__(
        self,
        model: BlockModel,
        feed: Feed,
        states: HiddenStates,
        routes: RoutingWatch,
        *,
        embedded: str = "embedded",
    ) -> None:
        """Before the first block all streams of a model are the same, and `embedded`."""
        self.model, self.feed, self.states, self.routes = model, feed, states, routes
        self._embedded = embedded
        longest = max((len(w.tokens) - 1 for windows in feed.items for w in windows), default=0)
        # A mask is made for a whole tree, and each of its sequences is rotated by its own length.
        branches = 0 < longest <= model.pad_until and model.takes_branches(longest)
        self.items = make_item_batches(feed.items, branches=branches, pad_until=model.pad_until)
        self._evaluated: dict[str, Sequence[Batch | ItemBatch]] = {
            "evaluation": feed.evaluation,
            "items": self.items,
        }
        self._called: dict[int, dict[int, Arguments]] = {}  # with trees, by batch, then by block
        self._room = MASKS_NBYTES

    def embed(self, *, calibration: bool, mini_batches: bool = False) -> None:
        """Embed all text; note what blocks are called with for mini-batches of a whole block."""
        calibrated = {"calibration": self.feed.calibration} if calibration else {}
        for part, batches in (calibrated | self._evaluated).items():
            for k, batch in enumerate(batches):
                if isinstance(batch, ItemBatch) and batch.branched:
                    hidden_BTD, _ = self._on_trees(k, batch)
                else:
                    hidden_BTD = self.model.embed(batch.tokens_BT.to(self.model.device))
                self.states.put(f"{part}/{self._embedded}", k, hidden_BTD)
        if mini_batches:
            shapes = {(len(places), places[0].width) for places in _cut(self.feed.calibration)}
            for shape in sorted(shapes):
                self.model.embed(torch.zeros(shape, dtype=torch.long, device=self.model.device))

    def drop_embedded(self, index: int = 0) -> None:
        """Drop what no stream reads behind a block."""
        for part in _PARTS:
            self.states.drop(f"{part}/{self._embedded}")
            passed = self.model.links.passed(index)
            self.states.drop_given(f"{part}/{self._embedded}", passed)

    def drop(self, stream: str) -> None:
        """Drop all hidden states of a stream."""
        for part in _PARTS:
            self.states.drop(f"{part}/{stream}")

    def calibration(self, stream: str, block: Block) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a stream's calibration batches as (hidden, valid)."""
        for k, batch in enumerate(self.feed.calibration):
            yield self._entering("calibration", stream, block, k), batch.valid_BT()

    def whole(self, stream: str, block: Block) -> WholeBlock:
        def own(k: int) -> Tensor:
            return rows.join(self._entering("calibration", stream, block, k))

        def calibrated() -> tuple[Linears, ...]:
            captured = capture_inputs(block, self.calibration(stream, block))
            return tuple(self.linears(block, group, captured.take(group)) for group in block.groups)

        def run(x_BTC: Tensor, quantized: Iterable[Quantized]) -> Tensor:
            with block.as_if(quantized):
                return block.forward(rows.split(x_BTC))

        rows = WideRows.of(self._entering("calibration", stream, block, 0))
        return WholeBlock(
            groups=tuple(map(block.linears, block.groups)),
            batches=_MiniBatches(
                _cut(self.feed.calibration),
                own,
                partial(self.states.get, f"calibration/{FULL_PRECISION}"),
            ),
            calibrated=calibrated,
            run=run,
        )

    def linears(self, block: Block, group: Group, inputs: Inputs | None) -> Linears:
        """Return a group with what its columns are calibrated on."""
        if inputs is not None and self.feed.perturbed:
            inputs = perturbed_inputs(inputs, block.index)
        return replace(block.linears(group, inputs), column_loop=self.feed.column_loop)

    def evaluate(self, stream: str, block: Block) -> None:
        for part, batches in self._evaluated.items():
            for k, batch in enumerate(batches):
                called = None
                if isinstance(batch, ItemBatch) and batch.branched:
                    called = (self._called.get(k) or self._on_trees(k, batch)[1])[block.index]
                hidden_BTD = block.forward(self._entering(part, stream, block, k), called)
                self.states.put(f"{part}/{stream}", k, hidden_BTD)

    def item_losses(self, stream: str) -> tuple[Floats, Marks]:
        """Turn hidden states into the losses of options, and whether all is likeliest."""
        count = sum(map(len, self.feed.items))
        losses, likeliest = np.zeros(count), np.ones(count, dtype=np.bool_)
        read = [
            self.model.target_nll(
                self.states.get(f"items/{stream}", k), batch.rows_Q, batch.targets_Q
            )
            for k, batch in enumerate(self.items)
        ]
        self.states.drop(f"items/{stream}")
        for batch, (nll_Q, greedy_Q) in zip(self.items, read, strict=True):
            np.add.at(losses, batch.options_Q, nll_Q.double().numpy())
            np.logical_and.at(likeliest, batch.options_Q, greedy_Q.numpy())
        return losses, likeliest

    def _on_trees(self, k: int, batch: ItemBatch) -> tuple[Tensor, dict[int, Arguments]]:
        """Embed trees; note what blocks are called with, while there is room for masks."""
        mask_B1TT = batch.mask(self.model.dtype, self.model.device)
        options = {"position_ids": batch.positions_BT, "attention_mask": mask_B1TT}
        on_device = {name: tensor.to(self.model.device) for name, tensor in options.items()}
        hidden_BTD, called = self.model.front.record(batch.tokens_BT, **on_device)
        if k not in self._called and mask_B1TT.nbytes <= self._room:
            self._called[k] = called
            self._room -= mask_B1TT.nbytes
        return hidden_BTD, called

    def is_last(self, block: Block) -> bool:
        return block.index == self.model.num_blocks - 1

    def may_wait_inside(self, block: Block) -> bool:
        """Return whether all calibration batches have room inside a block at the same time."""
        tokens = sum(batch.tokens_BT.numel() for batch in self.feed.calibration)
        matrices = [block.weight(name) for group in block.groups for name in group.linears]
        hidden, size = matrices[0].shape[1], matrices[0].element_size()  # reads the residual
        widest = max(side for matrix in matrices for side in matrix.shape)
        waiting = waiting_nbytes(tokens, hidden, widest, size)
        waiting += tokens * self.model.front.numbers_beside(block.index) * size
        return waiting <= self.states.nbytes_inside

    def _entering(self, part: str, stream: str, block: Block, k: int) -> Tensor:
        hidden_BTD = self.states.entering(f"{part}/{stream}", f"{part}/{self._embedded}", block, k)
        if self.feed.perturbed and stream != REFERENCE:
            hidden_BTD = leave(perturbed(hidden_BTD, block.index), beside(hidden_BTD))
        return self.routes.marked(hidden_BTD, (part, k))
