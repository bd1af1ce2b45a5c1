"""The stream of a file that is quantized already: its own model, block by block beside the base.

Everything of it is run as the file has it: embeddings, norms and head too, which AWQ changes. It
is the base's architecture and vocabulary, which is checked, and it has its own configuration.
What its linears are read from is one block at a time; parameters outside blocks that equal those
of the base take no memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path

from qaudit.checkpoints.quantized.repository import must_match
from qaudit.checkpoints.quantized.weights import QuantizedFolder
from qaudit.core.shipped import Shipped
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.item_stream import ItemStream
from qaudit.engine.streams import Feed, Stream, Tally, Tokens
from qaudit.errors import SourceError, UsageError
from qaudit.model.blocks import BlockModel
from qaudit.model.groups import Block

Opened = tuple[BlockModel, QuantizedFolder]


def opener(
    scheme: Shipped, folder: Path, base_folder: Path, base_names: frozenset[str]
) -> Callable[[BlockModel], Opened]:
    """Return what opens a shipped file once the base is there."""

    def opened(base: BlockModel) -> Opened:
        try:
            must_match(scheme.file, folder, base_folder)
        except UsageError as error:  # the plan could not see it: the file was on the Hub
            raise SourceError(error.message, hint=error.hint) from error
        weights = QuantizedFolder(folder, base=base_names)
        own = folder if (folder / "config.json").is_file() else base_folder
        model = BlockModel(own, weights, dtype=base.dtype, device=base.device)
        model.share_with(base)
        return model, weights

    return opened


class ShippedStream(Stream):
    """A stream whose every tensor is read from a quantized file."""

    evaluated = True

    def __init__(self, scheme: Shipped, opened: Opened, feed: Feed, states: HiddenStates) -> None:
        self.name, self.label = scheme.spec, scheme.short
        self.tally = Tally()
        self._model, weights = opened
        self._count(weights)
        items = ItemStream(self._model, feed.items, states, embedded=f"items/{scheme.spec}/first")
        self._tokens = Tokens(self._model, feed, states, items, embedded=f"{scheme.spec}/first")
        self._own: Block | None = None

    def _count(self, weights: QuantizedFolder) -> None:
        """Count what the file stores; nothing is added while it runs."""
        linears = weights.linears
        self.tally.bits = 8 * sum(weights.nbytes_of(name) for name in linears)
        self.tally.weights = sum(prod(layout.shape) for layout in linears.values())
        self.tally.nbytes = weights.nbytes
        self.tally.note(*weights.notes)

    def tokens(self, shared: Tokens) -> Tokens:
        return self._tokens

    def enter(self, block: Block, tokens: Tokens) -> Block:
        """Read the file's own block at the place of the base's."""
        if block.index == 0:
            self._tokens.embed(calibration=False)
        self._own = self._model.load(block.index)
        return self._own

    def leave(self, block: Block) -> None:
        if self._own is not None:
            self._own.release()
            self._own = None
        if block.index == 0:
            self._tokens.drop_embedded()

    def fail(self, error: SourceError) -> None:
        """Leave the pass with an error; the other streams go on."""
        self.evaluated, self.tally.error = False, error
        self._tokens.states.drop(f"evaluation/{self.name}")
        self._tokens.states.drop(f"items/{self.name}")
