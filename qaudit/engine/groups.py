"""Which linears of a block read the same input, and which scales their inputs could absorb.

Groups are found by running the block once on a short input and comparing the *objects* linears
are given, with every input held alive: an address says nothing, because the allocator hands a
freed one out again within the same pass, and a wrong group is a wrong Hessian that no loss
would betray.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qaudit.errors import ModelError

TOLERANCE = 1e-3
_LARGEST_SHARE_OUTSIDE = 0.05

Run = Callable[[nn.Module], Tensor]
"""Send a short input through a block and return what comes out."""


@dataclass(frozen=True, eq=False)
class Group:
    """Linears that read the same input tensor."""

    name: str
    linears: tuple[str, ...]
    fold_C: Tensor | None = None  # columns with the same index can share one absorbed scale


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
        """Name both ends."""
        return f"{self.source} -> {', '.join(self.linears)}"


@dataclass(frozen=True, eq=False)
class Structure:
    """What one short pass shows of a block: who reads what, and which norm made it."""

    readers: tuple[tuple[str, ...], ...]  # linears by common input, in order of execution
    norms: Mapping[tuple[str, ...], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Heads:
    """Attention heads, and how many channels each has."""

    query: int
    key_value: int
    width: int


def is_linear(module: nn.Module) -> bool:
    """Say whether a module multiplies by a matrix we quantize."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Say whether a module is GPT-2's linear, which stores its matrix as (C, R)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def weight_of(module: nn.Module) -> Tensor:
    """Return a linear's matrix as (R, C), a view."""
    weight = module.get_parameter("weight").data
    return weight.t() if is_transposed(module) else weight


def must_be_linear(block: nn.Module, where: str) -> None:
    """Refuse a block that keeps much of its weight where no scheme would see it."""
    covered = {f"{name}.weight" for name, module in block.named_modules() if is_linear(module)}
    sizes = {name: p.numel() for name, p in block.named_parameters() if p.dim() > 1}
    outside = {name: size for name, size in sizes.items() if name not in covered}
    if sum(outside.values()) > _LARGEST_SHARE_OUTSIDE * sum(sizes.values()):
        largest = max(outside, key=lambda name: outside[name])
        share = sum(outside.values()) / sum(sizes.values())
        raise ModelError(
            f"{share:.0%} of {where} is not in linear layers, most of it in `{largest}`",
            hint="mixture-of-experts models with fused experts cannot be audited yet",
        )


def find_structure(block: nn.Module, run: Run) -> Structure:
    """Run a block once and see which linears are given the same object."""
    readers: dict[int, list[str]] = {}
    norms: dict[int, str] = {}
    alive: list[Tensor] = []  # an id is only an identity while its owner lives

    def read(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs["input"]
        alive.append(given)
        readers.setdefault(id(given), []).append(name)

    def made(name: str, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if isinstance(out, Tensor):
            alive.append(out)
            norms[id(out)] = name

    handles = []
    for name, module in block.named_modules():
        if is_linear(module):
            handles.append(module.register_forward_pre_hook(partial(read, name), with_kwargs=True))
        elif isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 1:
            handles.append(module.register_forward_hook(partial(made, name)))
    try:
        run(block)
    finally:
        for handle in handles:
            handle.remove()
    _must_run_once(block, [name for names in readers.values() for name in names])
    return Structure(
        tuple(map(tuple, readers.values())),
        {tuple(names): norms[key] for key, names in readers.items() if key in norms},
    )


def _must_run_once(block: nn.Module, seen: Sequence[str]) -> None:
    for name in (name for name, module in block.named_modules() if is_linear(module)):
        if (times := seen.count(name)) != 1:
            raise ModelError(
                f"linear `{name}` runs {times} times when a block runs once",
                hint="models that route tokens between experts cannot be audited yet",
            )


# ------------------------------------------------------------------------------------ folds


def candidates(block: nn.Module, structure: Structure, heads: Heads) -> Iterator[Fold]:
    """Yield every place that could absorb a group's input scale, likely ones first."""
    earlier: list[str] = []
    for linears in structure.readers:
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
    found: dict[tuple[str, ...], Fold] = {}
    out = run(block)
    for fold in folds:
        if fold.linears not in found and leaves_unchanged(block, run, (fold,), out):
            found[fold.linears] = fold
    return tuple(found.values())


def leaves_unchanged(
    block: nn.Module, run: Run, folds: Sequence[Fold], out: Tensor | None = None
) -> bool:
    """Prove folds on an unquantized fp32 block, with the columns alone as the control."""
    out = run(block) if out is None else out
    generator = torch.Generator().manual_seed(0)
    scales = [
        torch.exp2(torch.rand(int(fold.index_C.max()) + 1, generator=generator) * 2 - 1)
        for fold in folds
    ]
    with _Scaled(block) as scaled:
        for fold, scale in zip(folds, scales, strict=True):
            scaled.columns(fold, scale)
        control = float((run(block) - out).abs().max())
        for fold, scale in zip(folds, scales, strict=True):
            scaled.rows(fold, scale)
        change = float((run(block) - out).abs().max())
    return control > 0 and change <= TOLERANCE * control


class _Scaled:
    """A block with scales applied, which are taken back at the end."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._before: dict[str, Tensor] = {}

    def __enter__(self) -> _Scaled:
        return self

    def __exit__(self, *_: object) -> None:
        for name, before in self._before.items():
            self._block.get_parameter(name).data.copy_(before)

    def columns(self, fold: Fold, scale: Tensor) -> None:
        """Multiply the columns of the group's linears."""
        for name in fold.linears:
            weight_RC = weight_of(self._keep(name))
            weight_RC.mul_(scale[fold.index_C].to(weight_RC.device))

    def rows(self, fold: Fold, scale: Tensor) -> None:
        """Divide the rows of the source, its bias with them."""
        source = self._keep(fold.source)
        rows = slice(fold.offset, fold.offset + len(scale))
        weight = weight_of(source) if is_linear(source) else source.get_parameter("weight").data
        scale = scale.to(weight.device)
        if fold.one_plus:
            weight[rows] = (1 + weight[rows]) / scale - 1
        else:
            weight[rows] /= scale[:, None] if weight.dim() == 2 else scale
        if getattr(source, "bias", None) is not None:
            source.get_parameter("bias").data[rows] /= scale

    def _keep(self, name: str) -> nn.Module:
        module = self._block.get_submodule(name)
        for part, parameter in module.named_parameters(recurse=False):
            self._before.setdefault(f"{name}.{part}", parameter.data.clone())
        return module
