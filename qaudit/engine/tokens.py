"""What goes through the blocks, and where the hidden states of every stream are between two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qaudit.core.linears import Inputs, Linears
from qaudit.core.whole_block import WholeBlock
from qaudit.engine.batches import Batch
from qaudit.engine.gathering import capture_inputs
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.items import ItemStream
from qaudit.engine.perturbation import perturbed, perturbed_inputs
from qaudit.engine.routing import BatchPlace, RoutingWatch
from qaudit.engine.whole_block import shapes, whole_block
from qaudit.formats.reading import QuantizedWeights
from qaudit.model.beside import beside, leave
from qaudit.model.blocks import Block, BlockModel, ExpertOptions, Group
from qaudit.planning.footprint import waiting_nbytes
from qaudit.types import FULL_PRECISION, Window

Openers = Mapping[str, Callable[[BlockModel], tuple[BlockModel, QuantizedWeights]]]
"""What opens each quantized file beside the model of its base, by canonical form."""

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
    shipped: Openers = field(default_factory=dict)
    reference: Callable[[BlockModel], BlockModel] | None = None  # opens the model of another
    experts: ExpertOptions = field(default_factory=ExpertOptions)
    column_loop: str = "plain"  # how GPTQ's columns are rounded


@dataclass(frozen=True, eq=False)
class Tokens:
    """Where the hidden states of every stream are between blocks."""

    model: BlockModel
    feed: Feed
    states: HiddenStates
    items: ItemStream
    routes: RoutingWatch
    embedded: str = "embedded"  # before the first block, all streams of a model are the same

    def embed(self, *, calibration: bool) -> None:
        for part, batches in self._parts(calibration).items():
            for k, batch in enumerate(batches):
                hidden_BTD = self.model.embed(batch.tokens_BT.to(self.model.device))
                self.states.put(f"{part}/{self.embedded}", k, hidden_BTD)
        self.items.embed()

    def embed_mini_batches(self) -> None:
        """Note what blocks are called with for each shape of mini-batch that is learned on."""
        for shape in sorted(shapes(self.feed.calibration)):
            self.model.embed(torch.zeros(shape, dtype=torch.long, device=self.model.device))

    def drop_embedded(self, index: int = 0) -> None:
        """Drop what no stream reads behind a block."""
        for part in self._parts(True):
            self.states.drop(f"{part}/{self.embedded}")
            self.states.drop_given(f"{part}/{self.embedded}", self.model.links.passed(index))
        self.items.drop_embedded(index)

    def calibration(self, stream: str, block: Block) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a stream's calibration batches as (hidden, valid)."""
        for k, batch in enumerate(self.feed.calibration):
            yield self._entering("calibration", stream, block, k), batch.valid_BT()

    def whole(self, stream: str, block: Block) -> WholeBlock:
        def calibrated() -> tuple[Linears, ...]:
            captured = capture_inputs(block, self.calibration(stream, block))
            return tuple(self.linears(block, group, captured.take(group)) for group in block.groups)

        return whole_block(
            block,
            self.feed.calibration,
            own=lambda k: self._entering("calibration", stream, block, k),
            full=lambda k: self.states.get(f"calibration/{FULL_PRECISION}", k),
            calibrated=calibrated,
        )

    def linears(self, block: Block, group: Group, inputs: Inputs | None) -> Linears:
        linears = block.linears(group, self.inputs(inputs, block))
        return replace(linears, column_loop=self.feed.column_loop)

    def inputs(self, inputs: Inputs | None, block: Block) -> Inputs | None:
        if inputs is None or not self.feed.perturbed:
            return inputs
        return perturbed_inputs(inputs, block.index)

    def evaluate(self, stream: str, block: Block) -> None:
        for k in range(len(self.feed.evaluation)):
            hidden_BTD = block.forward(self._entering("evaluation", stream, block, k))
            self.states.put(f"evaluation/{stream}", k, hidden_BTD)
        self.items.advance(stream, block)

    def is_last(self, block: Block) -> bool:
        return block.index == self.model.num_blocks - 1

    def fit_inside(self, block: Block) -> bool:
        tokens = sum(batch.tokens_BT.numel() for batch in self.feed.calibration)
        matrices = [block.weight(name) for group in block.groups for name in group.linears]
        hidden = matrices[0].shape[1]  # the first group reads the residual
        widest = max(side for matrix in matrices for side in matrix.shape)
        waiting = waiting_nbytes(tokens, hidden, widest, matrices[0].element_size())
        waiting += tokens * self.model.numbers_beside(block.index) * matrices[0].element_size()
        return waiting <= self.states.nbytes_inside

    def _parts(self, calibration: bool) -> dict[str, Sequence[Batch]]:
        fed = self.feed.calibration if calibration else ()
        return {"calibration": fed, "evaluation": self.feed.evaluation}

    def _entering(self, part: str, stream: str, block: Block, k: int) -> Tensor:
        hidden_BTD = self.states.entering(f"{part}/{stream}", f"{part}/{self.embedded}", block, k)
        if self.feed.perturbed and stream != REFERENCE:
            hidden_BTD = leave(perturbed(hidden_BTD, block.index), beside(hidden_BTD))
        return self.routes.marked(hidden_BTD, BatchPlace(part, k))
