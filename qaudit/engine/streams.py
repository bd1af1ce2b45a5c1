"""A stream: the text of an audit under one way of storing a model's linears.

Full precision leaves them as they are; a scheme quantizes them, and a scheme that calibrates on
its own past carries calibration tokens of its own. Each stream defines what a block's linears are
for it; the walk over blocks and the read-out treat all streams alike.

What modules around groups of linears return: attention for q/k/v, the MLP for gate/up.

Toolchains of AWQ choose scales by these outputs. A module is run alone, on what its linears read of
each calibration batch and with the other arguments that the block gave it for that shape. Where it
makes something of its input before its linears read it, or is called with other arguments for
another batch of that shape, it cannot be, and nothing is returned for that group.

Shapes: B windows, T tokens of each, D hidden, C columns.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qaudit.core.floats import bits_per_value, round_heads
from qaudit.core.linears import Around, Inputs, Linears, Quantize, Quantized
from qaudit.core.mixture import Table, bits_in
from qaudit.core.scheme import NO_CACHE, Calibration, Scheme
from qaudit.engine.gathering import (
    Captured,
    InFullPrecision,
    alone,
    capture_inputs,
    expert_inputs,
    for_everyone,
    groups_by_returning,
    groups_in_passing,
)
from qaudit.engine.tally import Tally
from qaudit.engine.tokens import Tokens
from qaudit.model.blocks import Block, ExpertOptions, Group
from qaudit.model.experts import Routed
from qaudit.model.groups import Read, RoundingCache
from qaudit.model.links import Arguments, Shape, is_same_call
from qaudit.types import FULL_PRECISION

Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Yield what a group reads of each calibration batch, and which positions hold a token."""


class Surroundings:
    """How the modules around the groups of one block are called."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self._around = {
            group.name: name
            for group in block.groups
            if group.expert is None and (name := _module_around(group.linears))
        }
        self._latest: dict[str, Tensor] = {}  # the first argument of a module
        self._calls: dict[tuple[str, Shape], Arguments] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as hooks:
            hooks.callback(self._latest.clear)
            for name in set(self._around.values()):
                module, called = self.block.module.get_submodule(name), partial(self._called, name)
                hooks.enter_context(module.register_forward_pre_hook(called, with_kwargs=True))
            yield

    def read(self, group: Group, x_BTC: Tensor) -> None:
        """Compare what a group reads with what the module around it was given."""
        name = self._around.get(group.name)
        if name is not None and self._latest.get(name) is not x_BTC:
            del self._around[group.name]

    def of(self, group: Group, batches: Batches) -> Around | None:
        """Return a comparison of a group's weights by the output of the module around it."""
        if group.name not in self._around:
            return None
        return partial(self._errors, self._around[group.name], batches)

    def _called(
        self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        x, called = Arguments.of(args, kwargs)
        self._latest[name] = x
        before = self._calls.setdefault((name, (x.shape[0], x.shape[1])), called)
        if not is_same_call(before, called):  # what earlier blocks left for a batch is in it
            self._around = {group: m for group, m in self._around.items() if m != name}

    def _errors(
        self, name: str, batches: Batches, candidates: Sequence[Callable[[], Mapping[str, Tensor]]]
    ) -> list[float]:
        block, module = self.block, self.block.module.get_submodule(name)
        linears = [linear for group in block.groups for linear in group.linears]
        inside = [linear for linear in linears if linear.startswith(f"{name}.")]
        original = {linear: block.weight(linear) for linear in inside}
        totals = [0.0] * len(candidates)
        for x_BTC, valid_BT in batches():
            called = self._calls[name, (x_BTC.shape[0], x_BTC.shape[1])]

            def run(weights: Mapping[str, Tensor]) -> Tensor:
                with block.as_if([Quantized({**original, **weights}, 0)]):
                    out_BTD = called.call(module, x_BTC)  # noqa: B023 - called at once
                return out_BTD[valid_BT].float()  # noqa: B023

            full_TD = run({})
            for k, candidate in enumerate(candidates):
                error_TD = run(candidate()).sub_(full_TD)
                totals[k] += float(error_TD.square_().sum(dtype=torch.float64))
        return totals


def _module_around(linears: Sequence[str]) -> str:
    """Return the module around several linears, with no name where that is the block."""
    common = posixpath.commonpath([linear.replace(".", "/") for linear in linears])
    return common.replace("/", ".") if len(linears) > 1 else ""


Observer = Callable[[Scheme, Linears, Quantized], None]
"""Called with every group of linears that a scheme quantized."""


class Stream:
    """What a block's linears are for one stream, and what came of it."""

    name: str
    label: str
    tally: Tally
    evaluated: bool = True

    def tokens(self, shared: Tokens) -> Tokens:
        """Return where its hidden states are; those of the base are shared."""
        return shared

    def state(self) -> dict[str, Any]:
        """Return what goes from block to block beside hidden states, as JSON takes it."""
        return self.tally.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.tally.restore(state)

    def enter(self, block: Block, tokens: Tokens) -> Block:
        raise NotImplementedError

    def leave(self, block: Block) -> None:
        block.restore()


class FullPrecision(Stream):
    """The stream that is never quantized; others may calibrate on what it sees."""

    def __init__(
        self,
        schemes: Sequence[Scheme] = (),
        *,
        evaluated: bool,
        routes: bool = False,
        name: str = FULL_PRECISION,
    ) -> None:
        """Keep what schemes need of the full-precision model's calibration.

        `routes`: calibrate to show `RoutingWatch` which experts tokens are sent to.
        """
        self.name = self.label = name
        self.tally, self.evaluated, self._routes = Tally(), evaluated, routes
        kinds = {scheme.calibration for scheme in schemes}
        self.captures = Calibration.FULL_PRECISION in kinds  # statistics of what each group reads
        self._teaches = Calibration.WHOLE_BLOCK in kinds  # with what each block returns
        # What runs the modules around groups, and what each group reads, token by token.
        self._surrounds = any(scheme.compares_modules for scheme in schemes)
        self._lends = self._surrounds or Calibration.BOTH_STREAMS in kinds
        self._surroundings: Surroundings | None = None  # of the block that is passed
        self._captured: Captured | None = None  # of the block that is passed
        self._lent: set[str] = set()  # doors of that block
        self._routed: dict[tuple[str, int], Routed] = {}  # of that block, by door and batch

    def enter(self, block: Block, tokens: Tokens) -> Block:
        """Return the block as it is; gather of its inputs what a scheme needs."""
        self._captured = None  # that of the block before goes before a new one comes
        self._routed.clear()
        while self._lent:
            tokens.states.drop(f"inputs/{self._lent.pop()}")
        if not (self.captures or self._lends or self._teaches or self._routes):
            return block
        stream, is_read = f"calibration/{self.name}", self._teaches or not tokens.is_last(block)
        batches = tokens.calibration(self.name, block)

        def keep(k: int, hidden_BTD: Tensor) -> None:
            if is_read:
                tokens.states.put(stream, k, hidden_BTD)

        if self._lends:
            batches = self._lending(block, tokens, batches)
        if self.captures:
            self._captured = capture_inputs(block, batches, keep)
        else:
            for k, (hidden_BTD, _) in enumerate(batches):
                keep(k, block.forward(hidden_BTD))
        if not is_read:
            tokens.states.drop(stream)
        return block

    def _lending(
        self, block: Block, tokens: Tokens, batches: Iterator[tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches, and keep what each group reads while one goes through the block."""
        around = self._surroundings = Surroundings(block) if self._surrounds else None

        def lend(door: str, read: Read) -> None:
            self._lent.add(door)
            if isinstance(read, Routed):
                tokens.states.put(f"inputs/{door}", k, read.hidden_NH)
                routed = read.only(tokens.feed.calibration[k].valid_BT().flatten())
                # What is kept in memory is which rows each expert reads; the rows are lent.
                self._routed[door, k] = replace(routed, hidden_NH=read.hidden_NH[:0])
                return
            tokens.states.put(f"inputs/{door}", k, read)
            if around is not None:
                around.read(block.doors[door][0], read)

        with nullcontext() if around is None else around.watched(), block.visited(lend):
            for k, batch in enumerate(batches):  # noqa: B007 - read by `lend`
                yield batch

    def surrounded(self, linears: Linears, group: Group, tokens: Tokens) -> Linears:
        """Return a group with what it reads and, where it runs alone, the module around it."""
        assert self._surroundings is not None, "no calls of modules were written down"
        block, expert = self._surroundings.block, group.expert

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for k, batch in enumerate(tokens.feed.calibration):
                x_BTC = tokens.states.get(f"inputs/{group.door}", k)
                # Beside experts, tokens are in one row already: (N, C).
                yield x_BTC, batch.valid_BT().to(x_BTC.device).reshape(x_BTC.shape[:-1])

        if expert is None:
            return replace(
                linears,
                around=self._surroundings.of(group, batches),
                tokens=lambda: (x_BTC[valid_BT] for x_BTC, valid_BT in batches()),
            )

        def rows_of_expert() -> Iterator[Tensor]:
            for k in range(len(tokens.feed.calibration)):
                hidden_NH = tokens.states.get(f"inputs/{group.door}", k)
                routed = replace(self._routed[group.door, k], hidden_NH=hidden_NH)
                if block.experts.see_all:
                    routed = for_everyone(routed)
                with block.as_it_was(expert.before):  # as its gate and up are now
                    yield expert_inputs(block, group, routed)[0]

        return replace(linears, tokens=rows_of_expert)

    def inputs(self, group: Group) -> Inputs | None:
        """Return the inputs of a group of the current block, where a scheme wants them."""
        return None if self._captured is None else self._captured.get(group)

    def lent(self, tokens: Tokens) -> InFullPrecision:
        """Return a function from a group of this block to its inputs in a batch."""
        return lambda group, k: tokens.states.get(f"inputs/{group.door}", k)


class SchemeStream(Stream):
    """A stream whose linears are quantized by a scheme."""

    def __init__(self, scheme: Scheme, full: FullPrecision, observe: Observer) -> None:
        """`full` has the statistics of a scheme that calibrates on the full-precision model."""
        self.scheme, self._full, self._observe = scheme, full, observe
        self.name, self.label = scheme.spec, scheme.short
        self.tally = Tally()
        self.table: Table = {}  # bits of each linear, where they differ
        self._cache: RoundingCache | None = None  # of the block that is passed
        self._options = ExpertOptions()  # of the block, as other schemes have them

    def enter(self, block: Block, tokens: Tokens) -> Block:
        outputs: list[Tensor] = []
        self._options = block.experts
        if self.scheme.experts_see_all:
            block.experts = replace(block.experts, see_all=True)
        if self.scheme.kv != NO_CACHE:
            self._cache = block.round_cache(self._round_heads)
        quantize: Quantize = self.scheme.quantize
        if self.scheme.calibration is Calibration.WHOLE_BLOCK:
            quantize = self.scheme.train(tokens.whole(self.name, block))
        with closing(self._groups(block, tokens, outputs)) as groups:
            for group, inputs in groups:
                linears = tokens.linears(block, group, inputs)
                if self.table:
                    bits = {n: bits_in(self.table, block.index, n) for n in group.linears}
                    linears = replace(linears, bits=bits)
                if self.scheme.compares_modules:
                    linears = self._full.surrounded(linears, group, tokens)
                quantized = quantize(linears)
                self.tally.count(quantized)
                if inputs is not None and inputs.seen is not None and group.expert is not None:
                    layer = block.index, group.expert.module
                    self.tally.expert_tokens.setdefault(layer, {})[group.expert.index] = inputs.seen
                self._observe(self.scheme, linears, quantized)
                block.install(quantized)
                del linears, quantized, inputs  # the next group is gathered without them
        if self.scheme.calibration.has_stream:
            self._advance(block, tokens, outputs)
        if self.scheme.calibration is Calibration.FULL_PRECISION:
            self.tally.note(*block.notes)  # which scales could not be folded here
        return block

    def take(self, table: Table) -> None:
        """Take the bits of each linear."""
        self.table = self.tally.mixture = dict(table)
        counts = Counter("".join(table.values()).replace("0", ""))
        of = ", ".join(f"{counts[bits]} in {bits}" for bits in sorted(counts))
        self.tally.note(f"bits differ by linear: of {counts.total()}, {of}")

    def leave(self, block: Block) -> None:
        """Leave the block as it was; note what a cache held, whose heads were seen by now."""
        if self._cache is not None and self._cache.width is not None:
            bits = bits_per_value(self.scheme.kv, self._cache.width)
            self.tally.note(f"keys and values in {self.scheme.kv}: {bits:.4g} bits each")
        block.experts = self._options
        super().leave(block)

    def _round_heads(self, states: Tensor) -> Tensor:
        rotated, clip = self.scheme.rotates_heads, self.scheme.cache_clip
        rounded = round_heads(states, self.scheme.kv, rotated=rotated, clip=clip)
        # Gradients pass what is rounded as if it were not.
        return states + (rounded - states).detach() if states.requires_grad else rounded

    def _groups(
        self, block: Block, tokens: Tokens, outputs: list[Tensor]
    ) -> Generator[tuple[Group, Inputs | None]]:
        calibration = self.scheme.calibration
        full = self._full.lent(tokens) if calibration is Calibration.BOTH_STREAMS else alone
        if not calibration.has_stream:
            for group in block.groups:
                wants = calibration.reads_full_precision or group.expert is None
                yield group, self._full.inputs(group) if wants else None
        elif calibration is Calibration.OWN_BLOCKS:
            captured = capture_inputs(block, tokens.calibration(self.name, block))
            yield from ((group, captured.take(group)) for group in block.groups)
        elif tokens.may_wait_inside(block):
            batches = list(tokens.calibration(self.name, block))
            yield from groups_in_passing(block, batches, outputs, full)
        else:
            yield from groups_by_returning(
                block, partial(tokens.calibration, self.name, block), full
            )

    def _advance(self, block: Block, tokens: Tokens, outputs: Sequence[Tensor]) -> None:
        """Store what calibration is behind the block, unless no block is left to read it."""
        stream = f"calibration/{self.name}"
        if tokens.is_last(block):
            tokens.states.drop(stream)
        elif outputs:
            for k, hidden_BTD in enumerate(outputs):
                tokens.states.put(stream, k, hidden_BTD)
        else:
            for k, (hidden_BTD, _) in enumerate(tokens.calibration(self.name, block)):
                # Under another name: later batches still have to enter the block.
                tokens.states.put(f"{stream}/left", k, block.forward(hidden_BTD))
            tokens.states.drop(stream)
            tokens.states.rename(f"{stream}/left", stream)
