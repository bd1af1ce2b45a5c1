"""Where a scale per input column can hide, proved rather than believed.

A fold is a place where a scale per input column can hide: columns of the group multiplied by
s, rows of whatever precedes it divided by s. Candidates are generous guesses from structure
alone: a norm whose output is the group's input, and every slice of an earlier linear that is as
wide as the input, or as wide as the key-value heads, each then shared by its query heads.
Nothing is believed of them; each is proved on the unquantized block in fp32. Post-norm models
such as OLMo 2 lose their norm folds here without being named, and gated MLPs keep theirs.

The proof scales by random factors in [1/2, 2] and compares two distances from the block's own
output: with columns and rows scaled, and, as a control, with the columns alone. A true fold
leaves rounding, 1e-5 of the control or less; a false one about as much as the control. The line
is drawn at 1e-3. If the control moves nothing, nothing can be proved and the fold is dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from qaudit.core.linears import FoldSource, Rows
from qaudit.errors import ModelError, is_out_of_memory
from qaudit.model.experts import ExpertPart
from qaudit.model.groups import Group
from qaudit.model.structure import (
    Run,
    Structure,
    find_structure,
    is_linear,
    must_be_linear,
    weight_of,
)
from qaudit.model.tape import Arguments, Shape
from qaudit.model.turns import TOLERANCE, Block32, all_numbers, changed

PROBE: Shape = (1, 16)
"""The shape of the short batch on which blocks are looked at."""


@dataclass(frozen=True, eq=False)
class Fold:
    """A place for a group's input scale: the rows that would be divided by it."""

    linears: tuple[str, ...]  # whose columns would be multiplied
    source: str
    offset: int  # first row of the source
    index_C: Tensor  # column -> row after the offset
    one_plus: bool = False  # the source is a norm that multiplies by (1 + weight)

    @property
    def label(self) -> str:
        return f"{self.source} -> {', '.join(self.linears)}"


@dataclass(frozen=True)
class Heads:
    """Attention heads, and how many channels each has."""

    query: int
    key_value: int
    width: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        config = config.get_text_config()
        try:
            query = int(getattr(config, "num_attention_heads", 0) or 0)
            key_value = int(getattr(config, "num_key_value_heads", None) or query)
            width = getattr(config, "head_dim", None)
        except (RuntimeError, ValueError):  # they vary from layer to layer
            return cls(0, 0, 0)
        if width is None and query:
            width = config.hidden_size // query
        return cls(query, key_value, int(width or 0))


def candidates(block: nn.Module, structure: Structure, heads: Heads) -> Iterator[Fold]:
    """Yield every place that could absorb a group's input scale, likely ones first."""
    earlier: list[str] = []
    for linears in structure.readers:
        if (part := structure.experts.get(linears)) is not None:
            yield from _of_an_expert(block, part)
            continue
        columns = weight_of(block.get_submodule(linears[0])).shape[1]
        norm = structure.norms.get(linears)
        if norm is not None and len(block.get_submodule(norm).get_parameter("weight")) == columns:
            for one_plus in (False, True):
                yield Fold(linears, norm, 0, torch.arange(columns), one_plus)
        for source in reversed(earlier):
            rows = weight_of(block.get_submodule(source)).shape[0]
            for index_C in _column_maps(columns, rows, heads):
                width = int(index_C.max()) + 1
                for offset in sorted({0, rows - width}, reverse=True):
                    yield Fold(linears, source, offset, index_C)
        earlier += linears


def _of_an_expert(block: nn.Module, part: ExpertPart) -> Iterator[Fold]:
    """Yield the fold of an expert's `down_proj` into its `up_proj`: nothing else is tried."""
    if part.is_down:
        columns = weight_of(block.get_submodule(part.linears[0])).shape[1]
        yield Fold(part.linears, part.before[-1], 0, torch.arange(columns))


def _column_maps(columns: int, rows: int, heads: Heads) -> Iterator[Tensor]:
    """Yield maps from input columns to source rows: one to one, or shared by query heads."""
    column_C = torch.arange(columns)
    if columns <= rows:
        yield column_C
    shared = heads.query > heads.key_value > 0 and heads.query % heads.key_value == 0
    if shared and columns == heads.query * heads.width and rows >= heads.key_value * heads.width:
        head_C, within_C = column_C // heads.width, column_C % heads.width
        yield head_C // (heads.query // heads.key_value) * heads.width + within_C


def true_folds(block: nn.Module, run: Run, folds: Sequence[Fold]) -> tuple[Fold, ...]:
    """Return the first fold of each group that leaves the block's output as it is."""
    proved: dict[tuple[str, ...], Fold] = {}
    out = run(block)
    for fold in folds:
        if fold.linears not in proved and leaves_unchanged(block, run, fold, out):
            proved[fold.linears] = fold
    return tuple(proved.values())


def leaves_unchanged(block: nn.Module, run: Run, fold: Fold, out: Tensor) -> bool:
    """Prove a fold on an unquantized fp32 block that gives `out`.

    One at a time: beside a fold that moves much, a false one that moves little would pass.
    """
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp2(torch.rand(int(fold.index_C.max()) + 1, generator=generator) * 2 - 1)
    with changed(block) as change:
        for name in fold.linears:
            weight_RC = weight_of(change(name))
            weight_RC.mul_(scale[fold.index_C].to(weight_RC.device))
        control = float((run(block) - out).abs().max())
        _divide_rows(change(fold.source), fold, scale)
        distance = float((run(block) - out).abs().max())
    return control > 0 and distance <= TOLERANCE * control


def _divide_rows(source: nn.Module, fold: Fold, scale: Tensor) -> None:
    rows = slice(fold.offset, fold.offset + len(scale))
    weight = weight_of(source) if is_linear(source) else source.get_parameter("weight").data
    scale = scale.to(weight.device)
    if fold.one_plus:
        weight[rows] = (1 + weight[rows]) / scale - 1
    else:
        weight[rows] /= scale[:, None] if weight.dim() == 2 else scale
    if getattr(source, "bias", None) is not None:
        source.get_parameter("bias").data[rows] /= scale


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
    """Refuse a block in which a position can see the one after it."""
    changed_BTD = hidden_BTD.clone()
    changed_BTD[:, -1] = hidden_BTD[:, -1].flip(-1)  # a LayerNorm removes what is added to all
    before = arguments.call(block, hidden_BTD)[:, :-1]
    after = arguments.call(block, changed_BTD)[:, :-1]
    if not torch.allclose(before, after, rtol=1e-4, atol=1e-4):
        raise ModelError(
            f"in block {index} a token sees the token after it",
            hint="only decoder language models have a next-token loss to audit",
        )
