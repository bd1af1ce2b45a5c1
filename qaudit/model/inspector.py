"""What can be done to each block: which linears read the same input, folds and rotations."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from qaudit.core.linears import FoldSource, Rows
from qaudit.errors import ModelError, is_out_of_memory
from qaudit.model.folds import Fold, Heads, candidates, true_folds
from qaudit.model.groups import Group
from qaudit.model.structure import Structure, find_structure, is_linear, must_be_linear
from qaudit.model.tape import Arguments, Shape
from qaudit.model.turns import Block32, all_numbers

PROBE: Shape = (1, 16)
"""The shape of the short batch on which blocks are looked at."""


@dataclass(eq=False)
class Inspector:
    """Looks at the blocks of one model, and remembers what it proved of each kind of block.

    Every block is run on a short random batch before it is used: once to see which linears read
    the same input, and twice a fold in an fp32 copy, to prove that the folds of the first block
    of its kind leave this very block unchanged. What does not hold is dropped and noted, so that
    a scheme can only ever be offered a scale that the model can absorb.
    """

    width: int  # of the hidden states
    heads: Heads
    dtype: torch.dtype
    device: torch.device
    gates: bool = False  # whether routers and other small gates are quantized
    rotations: bool = False  # whether a scheme asks which outputs can be rotated
    left: dict[str, str] = field(default_factory=dict)  # linears left as they are, and why
    _proved: dict[Any, tuple[Fold, ...]] = field(default_factory=dict)

    def look(
        self, index: int, block: nn.Module, arguments: Arguments
    ) -> tuple[tuple[Group, ...], tuple[str, ...]]:
        """Return a block's groups in order of execution, and notes on folds that do not hold.

        Experts of a layer are alike: folds are proved on the first, in a copy that has no other.
        """
        hidden_BTD = self.hidden()
        structure = find_structure(
            block,
            lambda module: _run_first(index, module, arguments, hidden_BTD.to(self.dtype)),
            gates=self.gates,
        )
        must_be_linear(block, f"block {index}", structure)
        self.left |= structure.left
        exact = copy.deepcopy(block).float()
        called = arguments.to_float32()
        sample = replace(structure, readers=tuple(map(structure.sampled, structure.readers)))
        sample = replace(sample, readers=tuple(dict.fromkeys(sample.readers)))
        folds, notes = self._folds(index, exact, sample, called)
        fold_of = {fold.linears: fold for fold in folds}
        rows = self._rows(exact, sample, folds, called) if self.rotations else None
        groups = tuple(
            self._group(block, linears, structure, fold_of, rows) for linears in structure.readers
        )
        return groups, notes

    def _group(
        self,
        block: nn.Module,
        linears: tuple[str, ...],
        structure: Structure,
        fold_of: Mapping[tuple[str, ...], Fold],
        rows: Mapping[str, Rows] | None,
    ) -> Group:
        name, expert = "+".join(linears), structure.experts.get(linears)
        sampled = structure.sampled(linears)
        fold = fold_of.get(sampled)
        if rows is not None:
            rows = {a: rows[b] for a, b in zip(linears, sampled, strict=True) if b in rows}
        if fold is None:
            return Group(name, linears, rows=rows, expert=expert)
        is_norm = not is_linear(block.get_submodule(fold.source))
        absorbs = fold.source if expert is None else expert.before[-1]
        source = FoldSource(absorbs, is_norm, fold.offset, fold.one_plus)
        return Group(name, linears, fold.index_C.to(self.device), source, rows, expert)

    def _rows(
        self, exact: nn.Module, structure: Structure, folds: Sequence[Fold], arguments: Arguments
    ) -> Mapping[str, Rows]:
        def run(module: nn.Module, hidden_BTD: Tensor) -> Tensor:
            return arguments.call(module, hidden_BTD)

        readers, hidden_BTD = structure.readers, self.hidden()
        return Block32(exact, run, hidden_BTD, readers, folds, self.heads).rotations()

    def _folds(
        self, index: int, exact: nn.Module, structure: Structure, arguments: Arguments
    ) -> tuple[tuple[Fold, ...], tuple[str, ...]]:
        hidden_BTD = self.hidden()

        def run(module: nn.Module) -> Tensor:
            return all_numbers(arguments.call(module, hidden_BTD))

        kind = (structure.readers, *(tuple(p.shape) for p in exact.parameters()))
        if kind not in self._proved:
            must_be_causal(index, exact, arguments, hidden_BTD)
            guesses = list(candidates(exact, structure, self.heads))
            self._proved[kind] = true_folds(exact, run, guesses)
            return self._proved[kind], ()
        proved = self._proved[kind]
        folds = true_folds(exact, run, proved)
        lost = [fold.label for fold in proved if fold not in folds]
        return folds, tuple(f"block {index}: scale not folded, {label}" for label in lost)

    def hidden(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(*PROBE, self.width, generator=generator).to(self.device)


def _run_first(index: int, block: nn.Module, arguments: Arguments, hidden_BTD: Tensor) -> Tensor:
    """Run a block for the first time: a config that contradicts itself shows here at last."""
    try:
        return arguments.call(block, hidden_BTD)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"block {index} cannot be run: {str(error).partition(chr(10))[0]}",
            hint="numbers in `config.json` may contradict each other",
        ) from error


def must_be_causal(index: int, block: nn.Module, arguments: Arguments, hidden_BTD: Tensor) -> None:
    """Refuse a block in which a position can see one after it."""
    half = hidden_BTD.shape[1] // 2
    changed_BTD = hidden_BTD.flip(-1)  # a LayerNorm removes what is added to all
    changed_BTD[0, :half] = hidden_BTD[0, :half]
    before = arguments.call(block, hidden_BTD)[0, :half]
    after = arguments.call(block, changed_BTD)[0, :half]
    if not torch.allclose(before, after, rtol=1e-4, atol=1e-4):
        raise ModelError(
            f"in block {index} a token sees tokens after it",
            hint="only decoder language models have a next-token loss to audit",
        )
