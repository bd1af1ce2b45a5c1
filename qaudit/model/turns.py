"""Which outputs of a block's linears may be rotated for nothing, proved rather than believed.

QuaRot's names: R1 rotates the residual. What writes to it (o, down) is then rotated in its rows,
and what reads it has the norm's weight in its columns. R2 rotates each head's values: rows of v,
columns of o. Whether a block allows them is tried on an unquantized fp32 copy, on a short batch:
it has to give the rotated output (R1), or the same output (R2), where rotating one side alone does
not. Norms behind sublayers (OLMo 2) and norms that subtract a mean have no free R1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qaudit.core.linears import Rows
from qaudit.core.rotation import rotate, rotate_rows
from qaudit.model.beside import beside
from qaudit.model.folds import TOLERANCE, Fold, Heads, changed
from qaudit.model.structure import is_linear, weight_of

Run = Callable[[nn.Module, Tensor], Tensor]
"""Send hidden states through a block."""


@dataclass(frozen=True, eq=False)
class Block32:
    """An unquantized fp32 copy of a block, and how it is run."""

    module: nn.Module
    run: Run
    hidden_BTD: Tensor
    readers: Sequence[tuple[str, ...]]  # linears by common input
    folds: Sequence[Fold]
    heads: Heads

    def rotations(self) -> Mapping[str, Rows]:
        """Return the rows of linears that can be rotated, with the width of the rotation."""
        return {**self._values(), **self._residual()}

    def _residual(self) -> dict[str, Rows]:
        norms = [fold for fold in self.folds if not self._is_linear(fold.source)]
        reading = {name for fold in norms for name in fold.linears}
        writers = [name for names in self.readers for name in names if name not in reading]
        width = self.hidden_BTD.shape[-1]
        if not norms or any(self._rows(name) != width for name in writers):
            return {}
        out_BTD = rotate(self.run(self.module, self.hidden_BTD))
        turned_BTD = rotate(self.hidden_BTD)
        with changed(self.module) as change:
            for fold in norms:
                norm = change(fold.source)
                weight = norm.get_parameter("weight").data
                for name in fold.linears:
                    reader = weight_of(change(name))
                    reader.copy_(rotate(reader * (1 + weight if fold.one_plus else weight)))
                weight.fill_(0 if fold.one_plus else 1)
            control = _distance(self.run(self.module, turned_BTD), out_BTD)
            for name in writers:
                _turn_rows(change(name), Rows(0, width, width))
            distance = _distance(self.run(self.module, turned_BTD), out_BTD)
        if control > 0 and distance <= TOLERANCE * control:
            return dict.fromkeys(writers, Rows(0, width, width))
        return {}

    def _values(self) -> dict[str, Rows]:
        head = self.heads.width
        out = all_numbers(self.run(self.module, self.hidden_BTD))
        for fold in self.folds:
            if head < 2 or not self._is_linear(fold.source):
                continue
            rows = Rows(fold.offset, fold.offset + int(fold.index_C.max()) + 1, head)
            if (rows.stop - rows.start) % head or len(fold.index_C) % head:
                continue
            with changed(self.module) as change:
                for name in fold.linears:
                    reader = weight_of(change(name))
                    reader.copy_(rotate(reader.reshape(-1, head)).reshape(reader.shape))
                control = _distance(all_numbers(self.run(self.module, self.hidden_BTD)), out)
                _turn_rows(change(fold.source), rows)
                distance = _distance(all_numbers(self.run(self.module, self.hidden_BTD)), out)
            if control > 0 and distance <= TOLERANCE * control:
                return {fold.source: rows}
        return {}

    def _is_linear(self, name: str) -> bool:
        return is_linear(self.module.get_submodule(name))

    def _rows(self, name: str) -> int:
        return len(weight_of(self.module.get_submodule(name)))


def all_numbers(out_BTD: Tensor) -> Tensor:
    """Return all numbers of what a block returns: a later block reads what is beside it."""
    tensors = beside(out_BTD).values()
    floats = [tensor.flatten() for tensor in tensors if tensor.is_floating_point()]
    return torch.cat([out_BTD.flatten(), *floats]) if floats else out_BTD


def _turn_rows(linear: nn.Module, rows: Rows) -> None:
    weight_RC = weight_of(linear)
    weight_RC.copy_(rotate_rows(weight_RC, rows))
    bias = getattr(linear, "bias", None)
    if bias is not None:
        bias.data.copy_(rotate_rows(bias.data[:, None], rows)[:, 0])


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
