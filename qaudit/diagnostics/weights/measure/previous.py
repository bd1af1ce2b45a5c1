"""The weights of the checkpoint before, read block by block in step with the subject."""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

from torch import Tensor

from qaudit.checkpoints.places import folder_of
from qaudit.diagnostics.case import Case
from qaudit.errors import SourceError
from qaudit.model.blocks import Block, BlockModel
from qaudit.model.remote import is_remote
from qaudit.types import Checkpoint


class PreviousWeights:
    """The weights of the checkpoint before, one block at a time."""

    def __init__(self, case: Case) -> None:
        """Open nothing until the first read."""
        self._case = case
        self.checkpoint: Checkpoint | None = case.previous
        self._blocks: Generator[Block, None, None] | None = None
        self._block: Block | None = None

    @property
    def label(self) -> str | None:
        """The label of the checkpoint before."""
        return None if self.checkpoint is None else self.checkpoint.label

    def weight(self, block: int, name: str) -> Tensor | None:
        """Return the same linear's weight before; None where it cannot be read."""
        if self.checkpoint is None or is_remote(folder_of(self.checkpoint)):
            return None
        try:
            while self._block is None or self._block.index < block:
                self._block = self._next()
            return self._block.weight(name) if self._block.index == block else None
        except (SourceError, OSError, StopIteration, AttributeError):
            self.close()
            self.checkpoint = None  # gone, or not the same architecture
            return None

    def close(self) -> None:
        """Close the files."""
        if self._blocks is not None:
            self._blocks.close()
        self._blocks = self._block = None

    def _next(self) -> Block:
        if self._blocks is None:
            weights, machine = self._case.previous_weights(), self._case.machine
            assert weights is not None and self.checkpoint is not None
            model = BlockModel(
                folder_of(self.checkpoint), weights, dtype=machine.dtype, device=machine.device
            )
            self._blocks = cast(Generator[Block, None, None], model.blocks())
        return next(self._blocks)
