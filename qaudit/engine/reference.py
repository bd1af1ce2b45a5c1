"""The stream of the reference: another subject, as it is, that every stream is compared with.

It runs block by block beside the subject, so that no logits are stored. Its own losses and tasks
are measured in its own pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.items import ItemStream
from qaudit.engine.routing import RoutingWatch
from qaudit.engine.streams import Stream
from qaudit.engine.tally import Tally
from qaudit.engine.tokens import Feed, Tokens
from qaudit.errors import ModelError
from qaudit.model.blocks import Block, BlockModel, Weights

NAME = "reference"


def opener(
    label: str, folder: Path, weights: Callable[[], Weights], *, trust_remote_code: bool
) -> Callable[[BlockModel], BlockModel]:
    def opened(base: BlockModel) -> BlockModel:
        model = BlockModel(
            folder,
            weights(),
            dtype=base.dtype,
            device=base.device,
            trust_remote_code=trust_remote_code,
        )
        kinds = [(each.model_type, each.num_blocks) for each in (model, base)]
        if kinds[0] != kinds[1]:
            raise ModelError(
                f"the reference `{label}` is a `{kinds[0][0]}` of {kinds[0][1]} blocks, and the "
                f"subject a `{kinds[1][0]}` of {kinds[1][1]}: they do not run side by side",
                hint="name a reference of the same architecture and depth",
            )
        model.share_with(base)
        return model

    return opened


class ReferenceStream(Stream):
    """A stream of another model, which is measured only to compare with it."""

    evaluated = True

    def __init__(self, model: BlockModel, feed: Feed, states: HiddenStates) -> None:
        """Take no items: their losses are those of its own pass."""
        self.name = self.label = NAME
        self.tally = Tally()
        self._model = model
        routes = RoutingWatch(())  # its experts are not compared
        items = ItemStream(model, (), states, routes, embedded=f"items/{NAME}/first")
        self._tokens = Tokens(model, feed, states, items, routes, embedded=f"{NAME}/first")
        self._block: Block | None = None

    def tokens(self, shared: Tokens) -> Tokens:
        return self._tokens

    def enter(self, block: Block, tokens: Tokens) -> Block:
        if block.index == 0:
            self._tokens.embed(calibration=False)
        self._block = self._model.load(block.index, block.groups)
        return self._block

    def leave(self, block: Block) -> None:
        if self._block is not None:
            self._block.release()
            self._block = None
        self._tokens.drop_embedded(block.index)
