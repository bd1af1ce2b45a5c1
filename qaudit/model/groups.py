"""A block, and which of its linears read the same input.

Groups are found by running the block once on a short input and comparing the *objects* linears
are given, with every input held alive: an address says nothing, because the allocator hands a
freed one out again within the same pass, and a wrong group is a wrong Hessian that no loss
would betray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from qaudit.core.activations import in_parts
from qaudit.core.linears import FoldSource, Inputs, Linears, Quantized, Rows
from qaudit.errors import ModelError
from qaudit.model.cache import RoundHeads, RoundingCache
from qaudit.model.skeleton import empty
from qaudit.model.tape import Arguments, Shape

_LARGEST_SHARE_OUTSIDE = 0.05

Run = Callable[[nn.Module], Tensor]
"""Send a short input through a block and return what comes out."""


@dataclass(frozen=True, eq=False)
class Group:
    """Linears that read the same input tensor."""

    name: str
    linears: tuple[str, ...]
    fold_C: Tensor | None = None  # columns with the same index can share one absorbed scale
    source: FoldSource | None = None  # what would absorb it
    rows: Mapping[str, Rows] | None = None  # outputs that can be rotated

    @property
    def fold_is_norm(self) -> bool:
        return self.source is not None and self.source.is_norm


@dataclass(frozen=True, eq=False)
class Structure:
    """What one short pass shows of a block: which linears read what, and which norm made it."""

    readers: tuple[tuple[str, ...], ...]  # linears by common input, in order of execution
    norms: Mapping[tuple[str, ...], str] = field(default_factory=dict)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies by a matrix we quantize."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear, which stores its matrix as (C, R)."""
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
        value = args[0] if args else kwargs["input"]
        alive.append(value)
        readers.setdefault(id(value), []).append(name)

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
                hint="mixture-of-experts and state-space models cannot be audited yet",
            )


class Block:
    """One transformer block with its weights, ready to run and to be quantized."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        groups: tuple[Group, ...],
        notes: tuple[str, ...],
        arguments: Callable[[Shape], Arguments],
        count: int = 1,
    ) -> None:
        self.index, self.module, self.groups, self.notes = index, module, groups, notes
        self._count = count  # of the model's blocks
        self._arguments = arguments  # looks up what the module is called with
        self._originals: dict[str, Tensor] = {}
        self._forwards: dict[str, Callable[[Tensor], Tensor]] = {}
        self._inputs: dict[str, _SharedInput] = {}
        self._cache: RoundingCache | None = None
        for group in groups:
            for name in group.linears:
                # Looked up at each call, not replaced: a call that already waits in a hook
                # has fetched its `forward` and must still run what is installed meanwhile.
                linear = module.get_submodule(name)
                linear.forward = partial(self._call, name, linear)

    def forward(self, hidden_BTD: Tensor, arguments: Arguments | None = None) -> Tensor:
        """Run the block as the model would, with its own arguments or those of its shape.

        Without arguments, a batch of this shape must have been embedded.
        """
        batch, length = hidden_BTD.shape[:2]
        called = arguments or self._arguments((batch, length))
        return called.call(self.module, hidden_BTD)

    def run_as(self, hidden_BTD: Tensor, quantized: Iterable[Quantized]) -> Tensor:
        """Run the block as if groups were installed; gradients reach what they are made of."""
        with self.as_if(quantized):
            return self.forward(hidden_BTD)

    @contextmanager
    def as_if(self, quantized: Iterable[Quantized]) -> Iterator[None]:
        """Let linears multiply as if groups were installed for a `with` body.

        Weights and forwards are used as they are given; no other parameter has a gradient.
        """
        before = self._forwards, self._inputs
        self._forwards, self._inputs = dict(self._forwards), dict(self._inputs)
        for one in quantized:
            for name, weight_RC in one.weights.items():
                self._forwards[name] = one.forwards.get(name) or partial(_product, weight_RC)
            if one.inputs is not None:
                self.change_inputs(tuple(one.weights), one.inputs, len(one.weights))
        try:
            yield
        finally:
            self._forwards, self._inputs = before

    def weight(self, name: str) -> Tensor:
        """Return a linear's full-precision weight as (R, C)."""
        linear = self.module.get_submodule(name)
        if name not in self._originals:
            return weight_of(linear)
        original = self._originals[name]
        return original.t() if is_transposed(linear) else original

    def linears(self, group: Group, inputs: Inputs | None = None) -> Linears:
        weights = {name: self.weight(name) for name in group.linears}
        return Linears(
            weights,
            inputs,
            group.fold_C,
            self.index,
            self._count,
            fold_is_norm=group.fold_is_norm,
            block_has_norm_folds=any(one.fold_is_norm for one in self.groups),
            norm_C=self._norm(group),
            fold_source=group.source,
            rows=group.rows,
            is_last=group is self.groups[-1],
        )

    def _norm(self, group: Group) -> Tensor | None:
        if group.source is None or not group.source.is_norm:
            return None
        weight = self.module.get_submodule(group.source.name).get_parameter("weight").data
        return 1 + weight if group.source.one_plus else weight

    def change_inputs(
        self, names: Sequence[str], change: Callable[[Tensor], Tensor], readers: int
    ) -> None:
        """Let linears read `change(x)` in place of x, computed once for all that share x."""
        shared = _SharedInput(change, readers)
        self._inputs |= dict.fromkeys(names, shared)

    def install(self, quantized: Quantized) -> None:
        """Put quantized weights, and forwards if a scheme has its own, in place."""
        for name, weight_RC in quantized.weights.items():
            linear = self.module.get_submodule(name)
            parameter = linear.get_parameter("weight")
            self._originals.setdefault(name, parameter.data)
            stored = weight_RC.t() if is_transposed(linear) else weight_RC
            parameter.data = stored.to(parameter.device, parameter.dtype).contiguous()
        self._forwards |= quantized.forwards
        for name in quantized.weights:
            self._inputs.pop(name, None)
        if quantized.inputs is not None:
            change = partial(in_parts, change=quantized.inputs)
            self.change_inputs(tuple(quantized.weights), change, len(quantized.weights))

    def round_cache(self, change: RoundHeads) -> RoundingCache:
        """Round keys and values until the block is restored."""
        self._cache = RoundingCache(self.index, self.module, change)
        return self._cache

    def restore(self) -> None:
        if self._cache is not None:
            self._cache.remove()
            self._cache = None
        for name, original in self._originals.items():
            self.module.get_submodule(name).get_parameter("weight").data = original
        self._originals.clear()
        self._forwards.clear()
        self._inputs.clear()

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Put full-precision weights in place for a `with` body."""
        linears = {name: self.module.get_submodule(name) for name in self._originals}
        installed = {name: one.get_parameter("weight").data for name, one in linears.items()}
        forwards, inputs = dict(self._forwards), dict(self._inputs)
        self.restore()
        try:
            yield
        finally:
            for name, weight in installed.items():
                parameter = linears[name].get_parameter("weight")
                self._originals[name], parameter.data = parameter.data, weight
            self._forwards |= forwards
            self._inputs |= inputs

    def release(self) -> None:
        """Give the block's memory back; it cannot run after this."""
        self.restore()
        for group in self.groups:
            for name in group.linears:
                del self.module.get_submodule(name).forward
        empty(self.module)

    def _call(self, name: str, linear: nn.Module, x: Tensor) -> Tensor:
        if name in self._inputs:
            x = self._inputs[name](x)
        replaced = self._forwards.get(name)
        if replaced is None:
            return type(linear).forward(linear, x)  # type: ignore[no-any-return]
        out = replaced(x)
        bias = getattr(linear, "bias", None)
        return out if bias is None else out + bias


def _product(weight_RC: Tensor, x: Tensor) -> Tensor:
    return nn.functional.linear(x, weight_RC.to(x.dtype))


class _SharedInput:
    """What the linears of a group read in place of x: computed once, and the same for all."""

    def __init__(self, change: Callable[[Tensor], Tensor], readers: int) -> None:
        self._change, self._readers = change, readers
        self._latest: tuple[Tensor, Tensor] | None = None  # x, and what is read in its place
        self._reads = 0

    def __call__(self, x: Tensor) -> Tensor:
        if self._latest is None or self._latest[0] is not x:
            self._latest, self._reads = (x, self._change(x)), 0
        changed = self._latest[1]
        self._reads += 1
        if self._reads == self._readers:
            self._latest = None  # nothing reads it again, and a batch's activations are large
        return changed
