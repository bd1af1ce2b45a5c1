"""A first look at each block: its groups, its folds, and whether it is what it seems.

Every block is run on a short random batch before it is used: once to see which linears read
the same input, and twice a fold in an fp32 copy, to prove that the folds found on the first
block of its kind leave this very block unchanged. What does not hold is dropped and noted, so
that a scheme can only ever be offered a scale that the model can absorb.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qaudit.errors import ModelError
from qaudit.model.folds import Fold, Heads, candidates, true_folds
from qaudit.model.groups import Group, Structure, find_structure, must_be_linear
from qaudit.model.tape import Arguments, Shape

PROBE: Shape = (1, 16)
"""The shape of the short batch on which blocks are looked at."""


@dataclass(eq=False)
class Inspector:
    """Looks at the blocks of one model, and remembers what it proved of each kind of block."""

    width: int  # of the hidden states
    heads: Heads
    dtype: torch.dtype
    device: torch.device
    _proved: dict[Any, tuple[Fold, ...]] = field(default_factory=dict)

    def look(
        self, index: int, block: nn.Module, arguments: Arguments
    ) -> tuple[tuple[Group, ...], tuple[str, ...]]:
        """Return a block's groups in order of execution, and notes on folds that do not hold."""
        must_be_linear(block, f"block {index}")
        hidden_BTD = self._hidden()
        structure = find_structure(
            block, lambda module: _run_first(index, module, arguments, hidden_BTD.to(self.dtype))
        )
        folds, notes = self._folds(index, block, structure, arguments.to_float32())
        index_of = {fold.linears: fold.index_C.to(self.device) for fold in folds}
        groups = tuple(
            Group("+".join(linears), linears, index_of.get(linears))
            for linears in structure.readers
        )
        return groups, notes

    def _folds(
        self, index: int, block: nn.Module, structure: Structure, arguments: Arguments
    ) -> tuple[tuple[Fold, ...], tuple[str, ...]]:
        exact = copy.deepcopy(block).float()
        hidden_BTD = self._hidden()

        def run(module: nn.Module) -> Tensor:
            return arguments.call(module, hidden_BTD)

        kind = (structure.readers, *(tuple(p.shape) for p in block.parameters()))
        if kind not in self._proved:
            _must_be_causal(index, exact, arguments, hidden_BTD)
            guesses = list(candidates(exact, structure, self.heads))
            self._proved[kind] = true_folds(exact, run, guesses)
            return self._proved[kind], ()
        folds = self._proved[kind]
        kept = true_folds(exact, run, folds)
        lost = [fold.label for fold in folds if fold not in kept]
        return kept, tuple(f"block {index}: scale not folded, {label}" for label in lost)

    def _hidden(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(*PROBE, self.width, generator=generator).to(self.device)


def _run_first(index: int, block: nn.Module, arguments: Arguments, hidden_BTD: Tensor) -> Tensor:
    """Run a block for the first time: a config that contradicts itself shows here at last."""
    try:
        return arguments.call(block, hidden_BTD)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ModelError(
            f"block {index} cannot be run: {str(error).partition(chr(10))[0]}",
            hint="numbers in `config.json` may contradict each other",
        ) from error


def _must_be_causal(index: int, block: nn.Module, arguments: Arguments, hidden_BTD: Tensor) -> None:
    """Refuse a block in which a position can see the one after it."""
    changed_BTD = hidden_BTD.clone()
    changed_BTD[:, -1] += 1
    before = arguments.call(block, hidden_BTD)[:, :-1]
    after = arguments.call(block, changed_BTD)[:, :-1]
    if not torch.allclose(before, after, rtol=1e-4, atol=1e-4):
        raise ModelError(
            f"in block {index} a token sees the token after it",
            hint="only decoder language models have a next-token loss to audit",
        )
