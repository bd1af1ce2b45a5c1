"""A block with its weights, and its linears in the groups that schemes see.

A cache that rounds what attention hands to it, for as long as a block belongs to one stream.

Attention of every family gives new keys and values to a cache, if it is called with one, and reads
what the cache returns. The one here returns them rounded and keeps nothing: all tokens of a window
are there at once.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from qaudit.core.floats import in_parts
from qaudit.core.linears import FoldSource, Inputs, Linears, Quantized, Rows
from qaudit.errors import ModelError
from qaudit.model.experts import ExpertPart, Experts, Routed, fuse
from qaudit.model.links import Arguments, Shape, beside
from qaudit.model.skeleton import empty
from qaudit.model.structure import is_transposed

NAMES = ("past_key_values", "layer_past")

RoundHeads = Callable[[Tensor], Tensor]

Read = Tensor | Routed
"""What a door is given of a batch: a tensor, or tokens with the experts that read them."""

Visit = Callable[[str, Read], None]
"""Called with a door and what it is given of one batch, once: q, k and v read the same."""

Choose = Callable[..., tuple[Tensor, ...] | None]
"""Called with a block, the name of experts, these, and what they are given; may return a routing
in place of that."""


class RoundingCache:
    """Gives a block's attention a cache that rounds."""

    def __init__(self, index: int, block: nn.Module, change: RoundHeads) -> None:
        """Refuse a block that takes no cache."""
        self._index, self._change = index, change
        self.width: int | None = None  # of a head, once there was one
        names = list(inspect.signature(type(block).forward).parameters)[1:]
        self._name = next((name for name in NAMES if name in names), "")
        if not self._name:
            raise self._refused("takes no cache")
        self._place = names.index(self._name)
        if any(hasattr(module, "kv_lora_rank") for module in block.modules()):
            raise self._refused("caches a latent, of which keys and values are made")

    def call(self, called: Arguments, block: nn.Module, hidden_BTD: Tensor) -> Tensor:
        """Run a block with such a cache, which it has to use once."""
        position, name, cache = self._place, self._name, _Rounding(self._round)
        before, after = list(called.before), called.after
        if called.keyword is None and position <= len(before):  # hidden states are first
            before[position - 1] = cache
        else:
            after = {**after, name: cache}
        out_BTD = replace(called, before=tuple(before), after=after).call(block, hidden_BTD)
        # What earlier blocks stored was rounded there.
        if cache.updates != 1 and not (cache.updates == 0 and called.has_stored):
            raise self._refused(f"hands keys and values to a cache {cache.updates} times")
        return out_BTD

    def _round(self, states: Tensor) -> Tensor:
        if states.dim() != 4:
            raise self._refused(f"caches {states.dim()} dimensions, not heads of tokens")
        self.width = states.shape[-1]
        return self._change(states)

    def _refused(self, why: str) -> ModelError:
        return ModelError(
            f"`kv` cannot round the keys and values of block {self._index}: its attention {why}",
            hint="leave `kv` out for this model",
        )


class _Rounding(DynamicCache):
    """Hands rounded keys and values back, and keeps none."""

    def __init__(self, change: RoundHeads) -> None:
        super().__init__()
        self._change, self.updates = change, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.updates += 1
        return self._change(key_states), self._change(value_states)


@dataclass(frozen=True)
class ExpertOptions:
    """How experts are chosen, and what they are calibrated on."""

    see_all: bool = False  # whether each sees all tokens, not those routed to it
    replays: bool = False  # whether streams are given full precision's choice of experts

    @property
    def text(self) -> str:
        """Return what differs from the default, for the identity of results."""
        return ",experts=replayed" if self.replays else ""


@dataclass(frozen=True, eq=False)
class Group:
    """Linears that read the same input tensor."""

    name: str
    linears: tuple[str, ...]
    fold_C: Tensor | None = None  # columns with the same index can share one absorbed scale
    source: FoldSource | None = None  # what would absorb it
    rows: Mapping[str, Rows] | None = None  # outputs that can be rotated
    expert: ExpertPart | None = None  # whose linears these are

    @property
    def door(self) -> str:
        """Return where batches wait while this group is quantized: all experts have one door."""
        return self.name if self.expert is None else self.expert.module

    @property
    def fold_is_norm(self) -> bool:
        return self.source is not None and self.source.is_norm


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
        self.experts = ExpertOptions()
        self.choose: Choose | None = None
        # What entered, and the doors it passed, by the thread of each batch.
        self._inside: dict[int, tuple[Tensor, set[str]]] = {}
        self.given: frozenset[str] = frozenset()  # what the model makes of tokens for it
        self.doors: dict[str, tuple[Group, ...]] = {}  # where batches wait -> what is behind it
        for group in groups:
            self.doors[group.door] = (*self.doors.get(group.door, ()), group)
        self._count = count  # of the model's blocks
        self._arguments = arguments  # looks up what the module is called with
        self._originals: dict[str, Tensor] = {}
        self._forwards: dict[str, Callable[[Tensor], Tensor]] = {}
        self._inputs: dict[str, Callable[[Tensor], Tensor]] = {}
        self._cache: RoundingCache | None = None
        self._visits: list[Visit] = []
        self._dense = {n: g.door for g in groups if g.expert is None for n in g.linears}
        for group in groups:
            for name in group.linears:
                # Looked up at each call, not replaced: a call that already waits in a hook
                # has fetched its `forward` and must still run what is installed meanwhile.
                linear = module.get_submodule(name)
                linear.forward = partial(self._call, name, linear)
        for name, experts in module.named_modules():
            if isinstance(experts, Experts):
                experts.first = partial(self._route, name, experts)

    def forward(self, hidden_BTD: Tensor, arguments: Arguments | None = None) -> Tensor:
        """Run the block as the model would, with its own arguments or those of its shape.

        Without arguments, a batch of this shape must have been embedded.
        """
        batch, length = hidden_BTD.shape[:2]
        called = arguments or self._arguments((batch, length))
        if tensors := beside(hidden_BTD):
            called = replace(called, beside=tensors)
        self._inside[threading.get_ident()] = hidden_BTD, set()
        try:
            call = called.call if self._cache is None else partial(self._cache.call, called)
            return call(self.module, hidden_BTD)
        finally:
            del self._inside[threading.get_ident()]

    @property
    def entered(self) -> Tensor | None:
        """The hidden states that are inside, in this thread."""
        entered, _ = self._inside.get(threading.get_ident(), (None, None))
        return entered

    @contextmanager
    def visited(self, visit: Visit) -> Iterator[None]:
        """Call `visit` where the first linear of a group, or the experts of a layer, will read."""
        self._visits.append(visit)
        try:
            yield
        finally:
            self._visits.remove(visit)

    @contextmanager
    def as_if(self, quantized: Iterable[Quantized]) -> Iterator[None]:
        """Let linears multiply as if groups were installed for a `with` body.

        Weights and forwards are used as they are given: gradients reach what they are made of,
        and no other parameter.
        """
        before = self._forwards, self._inputs
        self._forwards, self._inputs = dict(self._forwards), dict(self._inputs)
        for group in quantized:
            for name, weight_RC in group.weights.items():
                product = partial(_product, self.module.get_submodule(name), weight_RC)
                self._forwards[name] = group.forwards.get(name) or product
            if group.inputs is not None:
                self.change_inputs(tuple(group.weights), group.inputs)
        try:
            yield
        finally:
            self._forwards, self._inputs = before

    def weight(self, name: str) -> Tensor:
        """Return a linear's full-precision weight as (R, C)."""
        linear = self.module.get_submodule(name)
        original = self._originals.get(name, linear.get_parameter("weight").data)
        return original.t() if is_transposed(linear) else original

    def linears(self, group: Group, inputs: Inputs | None = None) -> Linears:
        norm_C = None
        if group.fold_is_norm and group.source is not None:
            norm_C = self.module.get_submodule(group.source.name).get_parameter("weight").data
            norm_C = 1 + norm_C if group.source.one_plus else norm_C
        return Linears(
            {name: self.weight(name) for name in group.linears},
            inputs,
            group.fold_C,
            self.index,
            self._count,
            fold_is_norm=group.fold_is_norm,
            block_has_norm_folds=any(group.fold_is_norm for group in self.groups),
            norm_C=norm_C,
            fold_source=group.source,
            rows=group.rows,
            is_last=group is self.groups[-1],
        )

    def change_inputs(self, names: Sequence[str], change: Callable[[Tensor], Tensor]) -> None:
        """Let linears read `change(x)` in place of x, computed once for all that share x."""
        self._inputs |= dict.fromkeys(names, _shared(change, len(names)))

    def install(self, quantized: Quantized) -> None:
        """Put quantized weights, and forwards if a scheme has its own, in place."""
        for name, weight_RC in quantized.weights.items():
            linear = self.module.get_submodule(name)
            parameter = linear.get_parameter("weight")
            self._originals.setdefault(name, parameter.data)
            stored = weight_RC.t() if is_transposed(linear) else weight_RC
            parameter.data = stored.to(parameter.device, parameter.dtype).contiguous()
            self._inputs.pop(name, None)
        self._forwards |= quantized.forwards
        if quantized.inputs is not None:
            change = partial(in_parts, change=quantized.inputs)
            self.change_inputs(tuple(quantized.weights), change)

    def round_cache(self, change: RoundHeads) -> RoundingCache:
        """Round keys and values until the block is restored."""
        self._cache = RoundingCache(self.index, self.module, change)
        return self._cache

    def restore(self) -> None:
        self._cache = None
        for name, original in self._originals.items():
            self.module.get_submodule(name).get_parameter("weight").data = original
        self._originals.clear()
        self._forwards.clear()
        self._inputs.clear()

    @contextmanager
    def as_it_was(self, names: Collection[str]) -> Iterator[None]:
        """Put full-precision weights of some linears in place for a `with` body."""
        tables: tuple[dict[str, Any], ...] = (self._originals, self._forwards, self._inputs)
        names = [name for name in names if name in self._originals]
        changed = [{n: table.pop(n) for n in names if n in table} for table in tables]
        installed = {}
        for name, original in changed[0].items():
            parameter = self.module.get_submodule(name).get_parameter("weight")
            installed[name], parameter.data = parameter.data, original
        try:
            yield
        finally:
            for name, weight in installed.items():
                self.module.get_submodule(name).get_parameter("weight").data = weight
            for table, before in zip(tables, changed, strict=True):
                table |= before

    def release(self) -> None:
        """Give the block's memory back; it cannot run after this."""
        self.restore()
        for group in self.groups:
            for name in group.linears:
                del self.module.get_submodule(name).forward
        fuse(self.module)
        empty(self.module)

    def _call(self, name: str, linear: nn.Module, x: Tensor) -> Tensor:
        if name in self._dense:
            self._arrive(self._dense[name], x)
        if name in self._inputs:
            x = self._inputs[name](x)
        if name not in self._forwards:
            return type(linear).forward(linear, x)  # type: ignore[no-any-return]
        out, bias = self._forwards[name](x), getattr(linear, "bias", None)
        return out if bias is None else out + bias

    def _route(
        self, name: str, experts: Experts, hidden: Tensor, *routing: Tensor
    ) -> tuple[Tensor, ...]:
        if self.choose is not None:
            routing = self.choose(self, name, experts, hidden, *routing) or routing
        if self._visits and name in self.doors:
            self._arrive(name, experts.routed(hidden, *routing))
        return routing

    def _arrive(self, door: str, read: Read) -> None:
        _, passed = self._inside.get(threading.get_ident(), (None, {door}))
        if self._visits and door not in passed:
            passed.add(door)
            for visit in self._visits:
                visit(door, read)


def _product(linear: nn.Module, weight_RC: Tensor, x: Tensor) -> Tensor:
    """Return what a linear makes of its input with another weight, without its bias."""
    if type(linear).forward is nn.Linear.forward or not isinstance(linear, nn.Linear):
        return nn.functional.linear(x, weight_RC.to(x.dtype))
    other = copy(linear)  # one that multiplies in its own way, as groups of rows do
    other._parameters = {"weight": weight_RC.to(x.dtype), "bias": None}  # type: ignore[dict-item]
    return type(linear).forward(other, x)


def _shared(change: Callable[[Tensor], Tensor], readers: int) -> Callable[[Tensor], Tensor]:
    """Return what linears of a group read in place of x: computed once, and the same for all."""
    latest: list[tuple[Tensor, Tensor]] = []  # x, and what is read in its place, for each reader

    def changed(x: Tensor) -> Tensor:
        if not latest or latest[0][0] is not x:
            latest[:] = [(x, change(x))] * readers
        return latest.pop()[1]  # after the last nothing is held: a batch's activations are large

    return changed
