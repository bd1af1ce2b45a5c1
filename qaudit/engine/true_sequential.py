"""Quantize a block while its calibration batches pass through it, once.

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
from contextlib import AbstractContextManager, suppress

import torch
from torch import Tensor

from qaudit.core.linears import Inputs
from qaudit.engine.gathering import Beside, Read, Sums, alone, gathered, hooked, without_padding
from qaudit.model.blocks import Block, Group


def groups_in_passing(
    block: Block,
    batches: Sequence[tuple[Tensor, Tensor]],
    outputs: list[Tensor],
    beside: Beside = alone,
) -> Iterator[tuple[Group, Inputs]]:
    """Yield each group with its inputs as all (hidden, valid) stand at its door.

    The caller installs the quantized group before it asks for the next. What leaves the block is
    added to `outputs`. Close the generator if it is not used up.
    """
    walkers = [_Walker(block, hidden_BTD) for hidden_BTD, _ in batches]
    valids = [valid_BT for _, valid_BT in batches]
    with _Doors(block, walkers):
        for walker in walkers:
            walker.start()
        for door, groups in block.doors.items():
            reads = [w.at_door(door, valid) for w, valid in zip(walkers, valids, strict=True)]
            yield from _one_after_another(block, groups, reads, valids, beside)
            for walker in walkers:
                walker.resume()
    outputs += [walker.result() for walker in walkers]


def groups_by_returning(
    block: Block, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]], beside: Beside = alone
) -> Iterator[tuple[Group, Inputs]]:
    """Yield each group with its inputs; all batches enter the block anew for each door."""
    for door, groups in block.doors.items():
        if groups[0].expert is None:
            yield groups[0], _inputs_at(block, groups[0], batches(), beside)
            continue
        kept: list[tuple[Read, Tensor]] = []  # as much as the hidden states between two blocks
        _turn_back_at(
            block,
            door,
            batches(),
            lambda read, valid_BT, k: kept.append((without_padding(read, valid_BT), valid_BT)),  # noqa: B023
        )
        reads, valids = [read for read, _ in kept], [valid_BT for _, valid_BT in kept]
        yield from _one_after_another(block, groups, reads, valids, beside)


def _one_after_another(
    block: Block,
    groups: Sequence[Group],
    reads: Sequence[Read],
    valids: Sequence[Tensor],
    beside: Beside,
) -> Iterator[tuple[Group, Inputs]]:
    """Yield the groups behind one door: of an expert, down reads what gate and up make by then."""
    for group in groups:

        def batches(group: Group = group) -> Iterator[tuple[Read, Tensor, Tensor | None]]:
            for k, (read, valid_BT) in enumerate(zip(reads, valids, strict=True)):
                yield read, valid_BT, beside(group, k)

        yield group, gathered(block, group, batches)


def _inputs_at(
    block: Block, group: Group, batches: Iterable[tuple[Tensor, Tensor]], beside: Beside
) -> Inputs:
    """Let every batch go as far as the door of a group; return the statistics of its input."""
    sums = Sums()
    _turn_back_at(
        block,
        group.door,
        batches,
        lambda read, valid_BT, k: sums.add(block, group, read, valid_BT, beside(group, k)),
    )
    return sums.inputs(block, group)


def _turn_back_at(
    block: Block,
    door: str,
    batches: Iterable[tuple[Tensor, Tensor]],
    visit: Callable[[Read, Tensor, int], None],
) -> None:
    valid_BT: Tensor
    k: int

    def turn_back(reached: str, read: Read) -> None:
        if reached == door:
            visit(read, valid_BT, k)
            raise _AbandonedError

    with hooked(block, turn_back):
        for k, (hidden_BTD, valid_BT) in enumerate(batches):  # noqa: B007 - read by the hook
            with suppress(_AbandonedError):
                block.forward(hidden_BTD)


class _Walker(threading.Thread):
    """One batch on its way through the block. Runs only between `start`/`resume` and a door."""

    def __init__(self, block: Block, hidden_BTD: Tensor) -> None:
        super().__init__(daemon=True)
        self._block = block
        self._hidden_BTD: Tensor | None = hidden_BTD
        self._baton = threading.Semaphore(0)  # released to let the batch walk
        self._stopped = threading.Semaphore(0)  # released when it stands at a door or is out
        self._door: tuple[str, Read] | None = None
        self._passed: set[str] = set()
        self._outcome: Tensor | BaseException | None = None
        self._abandoned = False

    def start(self) -> None:
        super().start()
        self._stopped.acquire()

    def resume(self) -> None:
        self._door = None
        self._baton.release()
        self._stopped.acquire()

    def at_door(self, door: str, valid_BT: Tensor) -> Read:
        self._raise()
        if self._door is None or self._door[0] != door:
            standing = self._door[0] if self._door else "the exit"
            raise AssertionError(f"a batch stands at {standing}, not at `{door}`")
        return without_padding(self._door[1], valid_BT)

    def result(self) -> Tensor:
        self._raise()
        assert isinstance(self._outcome, Tensor)
        self.join()
        return self._outcome

    def abandon(self) -> None:
        if self.is_alive():
            self._abandoned = True
            self._baton.release()
            self.join()

    def visit(self, door: str, read: Read) -> None:
        """Stop at a door when its first linear, or the experts behind it, are about to read."""
        if door in self._passed:
            return
        self._passed.add(door)
        self._door = (door, read)
        self._stopped.release()
        self._baton.acquire()
        if self._abandoned:
            raise _AbandonedError

    def run(self) -> None:
        try:
            with torch.no_grad():
                hidden_BTD, self._hidden_BTD = self._hidden_BTD, None
                assert hidden_BTD is not None
                self._outcome = self._block.forward(hidden_BTD)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._outcome = error
        self._stopped.release()

    def _raise(self) -> None:
        if isinstance(self._outcome, BaseException):
            raise self._outcome


class _AbandonedError(Exception):
    """Leaves a block before its end."""


class _Doors:
    """The hooks that stop walkers, for as long as a block is being passed."""

    def __init__(self, block: Block, walkers: Sequence[_Walker]) -> None:
        self._walkers = walkers
        self._hooks: AbstractContextManager[None] = hooked(block, self._visit)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        for walker in self._walkers:
            walker.abandon()
        self._hooks.__exit__(None, None, None)

    def _visit(self, door: str, read: Read) -> None:
        walker = threading.current_thread()
        assert isinstance(walker, _Walker)
        walker.visit(door, read)
