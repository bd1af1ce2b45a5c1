"""The items of tasks on their way through the blocks, in every stream beside its documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.item_batches import ItemBatch, make_item_batches, option_sums
from qaudit.model.blocks import Block, BlockModel
from qaudit.model.tape import Arguments
from qaudit.planning.price import MASKS_NBYTES
from qaudit.types import Window

if TYPE_CHECKING:
    from qaudit.engine.tally import Tally


class ItemStream:
    """Batches of items and where their hidden states are."""

    def __init__(
        self,
        model: BlockModel,
        parts: Sequence[Sequence[Window]],
        states: HiddenStates,
        *,
        embedded: str = "items/embedded",
    ) -> None:
        """Hold items of one model; before the first block all of its streams are the same."""
        self._embedded = embedded
        self._model, self._states, self._count = model, states, sum(map(len, parts))
        self.batches = make_item_batches(parts, branches=model.takes_branches)
        self._called: dict[int, dict[int, Arguments]] = {}  # by batch, then by block
        self._room = MASKS_NBYTES

    def embed(self) -> None:
        """Put the embedded tokens where all streams start from."""
        for k, batch in enumerate(self.batches):
            if batch.branched:
                hidden_BTD, _ = self._branched(k, batch)
            else:
                hidden_BTD = self._model.embed(batch.tokens_BT)
            self._states.put(self._embedded, k, hidden_BTD)

    def drop_embedded(self) -> None:
        self._states.drop(self._embedded)

    def advance(self, stream: str, block: Block) -> None:
        """Send the items of a stream through a block."""
        source = self._embedded if block.index == 0 else f"items/{stream}"
        for k, batch in enumerate(self.batches):
            called = self._arguments(k, batch)[block.index] if batch.branched else None
            hidden_BTD = block.forward(self._states.get(source, k), called)
            self._states.put(f"items/{stream}", k, hidden_BTD)

    def read_out(self, stream: str, tally: Tally) -> None:
        """Turn hidden states into the losses of options."""
        nll, greedy = list[Tensor](), list[Tensor]()
        for k, batch in enumerate(self.batches):
            hidden_BTD = self._states.get(f"items/{stream}", k)
            nll_Q, greedy_Q = self._model.target_nll(hidden_BTD, batch.rows_Q, batch.targets_Q)
            nll.append(nll_Q)
            greedy.append(greedy_Q)
        self._states.drop(f"items/{stream}")
        tally.options = option_sums(self.batches, nll, greedy, self._count)

    def _arguments(self, k: int, batch: ItemBatch) -> dict[int, Arguments]:
        return self._called.get(k) or self._branched(k, batch)[1]

    def _branched(self, k: int, batch: ItemBatch) -> tuple[Tensor, dict[int, Arguments]]:
        mask_B1TT = batch.mask(self._model.dtype, self._model.device)
        hidden_BTD, arguments = self._model.branched(batch.tokens_BT, batch.positions_BT, mask_B1TT)
        if k not in self._called and mask_B1TT.nbytes <= self._room:
            self._called[k] = arguments
            self._room -= mask_B1TT.nbytes
        return hidden_BTD, arguments
