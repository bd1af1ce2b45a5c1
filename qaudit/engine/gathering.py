"""What groups of linears read of calibration batches, as second moments.

A dense group has one door: its first linear. All experts of a layer have one door together, the
module that holds them. What it is given is kept, tokens and routing, and each expert's moments are
made of it when they are asked for: gather its tokens, multiply; for `down_proj`, first through its
gate and up. One expert's Gram matrix is held at a time, where a layer's would take up to 85 GB.

Shapes: B windows, T tokens, N = B x T, C columns, H hidden.

Quantize a block while its calibration batches pass through it, once.

GPTQ's "true sequential" order quantizes a block's linears one group after another, each on
inputs that already went through the quantized groups before it. Done naively that costs one
pass of the calibration set per group. Here every batch has a thread that runs the block and
stops at the door of each group; when all batches stand at the same door, their statistics are
complete, the group is quantized, and they walk on through it. Exactly one thread runs at a
time, in batch order, so that the result does not depend on scheduling. The price is memory:
the activations of one block for all batches, (hidden + ffn) per token.

Where a calibration set is too long for that, every batch starts from the block's entrance again
for each group and turns back at its door. Only one batch is then inside at a time; the same
products are formed in the same order, so that not a bit of the result is another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from qaudit.core.linears import Inputs, InputsAccumulator
from qaudit.model.blocks import Block, Group
from qaudit.model.device import upload
from qaudit.model.experts import Experts, Routed
from qaudit.model.groups import Read

InFullPrecision = Callable[[Group, int], Tensor | None]
"""Return a door's input in full precision for a batch, or None where it is unused."""


def alone(group: Group, batch: int) -> None:
    """Ask for nothing of full precision."""


@dataclass(eq=False)
class Captured:
    """What groups of a block read of batches.

    Behind an expert's gate and up that is what these made as they were, or `as_installed`.
    """

    block: Block
    full: InFullPrecision = alone
    as_installed: bool = False
    sums: dict[str, InputsAccumulator] = field(default_factory=dict)  # by dense group
    inputs: dict[str, Inputs] = field(default_factory=dict)  # the same, as they came out
    routed: dict[str, list[Routed]] = field(default_factory=dict)  # by door, batch by batch

    def add(self, door: str, read: Read, valid_BT: Tensor, k: int) -> None:
        """Add what a door is given of a batch, padding left out."""
        if isinstance(read, Routed):
            self.routed.setdefault(door, []).append(read.only(valid_BT.flatten()))
            return
        group = self.block.doors[door][0]
        full = self.full(group, k)
        if group.name not in self.sums:
            self.sums[group.name] = InputsAccumulator(read.shape[-1], read.device)
        self.sums[group.name].add(
            _rows(read, valid_BT), None if full is None else _rows(full, valid_BT)
        )

    def take(self, group: Group) -> Inputs:
        inputs = self.get(group)
        self.inputs.pop(group.name, None)
        return inputs

    def get(self, group: Group) -> Inputs:
        if (part := group.expert) is None:
            if group.name not in self.inputs:
                assert group.name in self.sums, f"no batch came to `{group.name}`"
                self.inputs[group.name] = self.sums.pop(group.name).result()
            return self.inputs[group.name]
        reads: Iterable[Routed] = self.routed[group.door]
        seen = sum(len(read.rows[part.index]) for read in reads)
        if self.block.experts.see_all:
            reads = map(for_everyone, reads)
        accumulator: InputsAccumulator | None = None
        with self.block.as_it_was(() if self.as_installed else part.before):
            for k, read in enumerate(reads):
                x_TC, full_TC = expert_inputs(self.block, group, read, self.full(group, k))
                accumulator = accumulator or InputsAccumulator(x_TC.shape[-1], x_TC.device)
                accumulator.add(x_TC, full_TC)
        assert accumulator is not None, f"no batch came to `{group.name}`"
        return replace(enough(accumulator.result()), seen=seen)

    def behind(self, door: str) -> Iterator[tuple[Group, Inputs]]:
        """Yield the groups behind a door; down reads what an expert's gate and up make by then."""
        for group in self.block.doors[door]:
            yield group, self.take(group)
        self.routed.pop(door, None)


def for_everyone(read: Routed) -> Routed:
    """Return a read in which every expert reads every token, where that can be had."""
    if read.everyone is None:
        return read
    everyone = (read.everyone,) * len(read.rows)
    return replace(read, rows=everyone, tokens=everyone)


def _rows(x: Tensor, valid_BT: Tensor) -> Tensor:
    rows_NC = x.flatten(0, -2)  # beside experts they are in one row already
    if bool(valid_BT.all()):
        return rows_NC
    # Indices are made on the host: a GPU would have to tell how many rows a mask leaves.
    return rows_NC[upload(valid_BT.flatten().nonzero().squeeze(1), x.device)]


def expert_inputs(
    block: Block, group: Group, read: Routed, full_NH: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the inputs of an expert's linears, and the same tokens in full precision."""
    part, full_TH = group.expert, None
    assert part is not None
    experts = block.module.get_submodule(part.module)
    assert isinstance(experts, Experts)
    expert, rows_T = experts.expert(part.index), read.rows[part.index]
    x_TH = read.hidden_NH[rows_T]
    if full_NH is not None:
        full_TH = full_NH.reshape(-1, full_NH.shape[-1]).to(x_TH.device)[rows_T]
        routed_T1 = full_TH.ne(0).any(1, keepdim=True)  # Llama 4 gives zeros to other experts
        full_TH = torch.where(routed_T1, full_TH, x_TH)
    if not part.is_down:
        return x_TH, full_TH
    if full_TH is not None:
        with block.as_it_was(part.before):
            full_TH = expert.inner(full_TH)
    return expert.inner(x_TH), full_TH


def enough(inputs: Inputs) -> Inputs:
    """Return the inputs of an expert, or the identity where no token reached it.

    On the identity calibrated schemes round to nearest. Columns that no token moved are not dead,
    as they are in a dense model: zeroing them loses more than rounding to nearest, so that they
    keep their weights as if they were independent.
    """
    if not inputs.tokens:
        one_C = torch.ones(len(inputs.gram_CC), device=inputs.gram_CC.device)
        return Inputs(torch.diag(one_C), one_C, 1, one_C, None, one_C[None])
    diagonal_C = inputs.gram_CC.diagonal()
    unmoved_C = diagonal_C == 0
    if bool(unmoved_C.any()):
        diagonal_C[unmoved_C] = diagonal_C.mean().clamp(min=1e-12)
    return inputs


def capture_inputs(
    block: Block,
    batches: Iterable[tuple[Tensor, Tensor]],
    keep: Callable[[int, Tensor], None] = lambda k, hidden_BTD: None,
) -> Captured:
    """Pass batches through a block as it is and `keep` what comes out; return what groups read."""
    captured = Captured(block)
    for k, (hidden_BTD, valid_BT) in enumerate(batches):
        with block.visited(partial(captured.add, valid_BT=valid_BT, k=k)):
            keep(k, block.forward(hidden_BTD))
    return captured


def groups_in_passing(
    block: Block,
    batches: Sequence[tuple[Tensor, Tensor]],
    outputs: list[Tensor],
    full: InFullPrecision = alone,
) -> Iterator[tuple[Group, Inputs]]:
    """Yield each group with its inputs as all (hidden, valid) stand at its door.

    The caller installs the quantized group before it asks for the next. What leaves the block is
    added to `outputs`. Close the generator if it is not used up.
    """
    captured = Captured(block, full, as_installed=True)
    walkers = [_Walker(block, hidden_BTD) for hidden_BTD, _ in batches]
    with block.visited(_Walker.visit):
        try:
            for door in block.doors:
                for k, (walker, (_, valid_BT)) in enumerate(zip(walkers, batches, strict=True)):
                    captured.add(door, walker.walk_to(door), valid_BT, k)
                yield from captured.behind(door)
            outputs += [walker.walk_to(_EXIT) for walker in walkers]
        finally:
            for walker in walkers:
                if walker.is_alive():
                    walker.orders.put(False)
                    walker.join()


def groups_by_returning(
    block: Block,
    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    full: InFullPrecision = alone,
) -> Iterator[tuple[Group, Inputs]]:
    """Yield each group with its inputs; all batches enter the block anew for each door."""
    captured = Captured(block, full, as_installed=True)

    def turn_back(reached: str, read: Read) -> None:
        if reached == door:
            captured.add(door, read, valid_BT, k)
            raise _AbandonedError

    with block.visited(turn_back):
        for door in block.doors:
            for k, (hidden_BTD, valid_BT) in enumerate(batches()):  # noqa: B007 - read there
                with suppress(_AbandonedError):
                    block.forward(hidden_BTD)
            yield from captured.behind(door)


class _Walker(threading.Thread):
    """One batch on its way through the block. Walks only while the thread that made it waits."""

    def __init__(self, block: Block, hidden_BTD: Tensor) -> None:
        super().__init__(daemon=True)
        self._block = block
        self._hidden_BTD: Tensor | None = hidden_BTD
        self.orders = SimpleQueue[bool]()  # to walk on, or to turn back
        self._arrivals = SimpleQueue[tuple[str, Read] | BaseException]()

    def walk_to(self, door: str) -> Any:
        """Let the batch walk to a door, or the exit; return what is given there."""
        if not self.is_alive():
            self.start()
        self.orders.put(True)
        arrived = self._arrivals.get()
        if isinstance(arrived, BaseException):
            raise arrived
        assert arrived[0] == door, f"a batch stands at `{arrived[0]}`, not at `{door}`"
        return arrived[1]

    @staticmethod
    def visit(door: str, read: Read) -> None:
        """Let the batch of this thread stop at a door."""
        walker = threading.current_thread()
        assert isinstance(walker, _Walker)
        walker._arrivals.put((door, read))
        if not walker.orders.get():
            raise _AbandonedError

    def run(self) -> None:
        try:
            with torch.no_grad():
                hidden_BTD, self._hidden_BTD = self._hidden_BTD, None
                assert hidden_BTD is not None and self.orders.get()
                self._arrivals.put((_EXIT, self._block.forward(hidden_BTD)))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._arrivals.put(error)


_EXIT = "the exit"


class _AbandonedError(Exception):
    """Leaves a block before its end."""
