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
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from qaudit.core.gram import InputsAccumulator
from qaudit.core.linears import Inputs
from qaudit.model.blocks import Block, Group

Beside = Callable[[Group, int], Tensor | None]
"""Return what a group reads of a batch in full precision, or None where nothing asks for it."""


def alone(group: Group, batch: int) -> None:
    """Ask for nothing of full precision."""


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
    with _Doors(block, walkers):
        for walker in walkers:
            walker.start()
        for group in block.groups:
            yield group, _gather(group, walkers, [valid_BT for _, valid_BT in batches], beside)
            for walker in walkers:
                walker.resume()
    outputs += [walker.result() for walker in walkers]


def groups_by_returning(
    block: Block, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]], beside: Beside = alone
) -> Iterator[tuple[Group, Inputs]]:
    """Yield each group with its inputs; all batches enter the block anew for each."""
    for group in block.groups:
        yield group, _inputs_at(block, group, batches(), beside)


def _inputs_at(
    block: Block, group: Group, batches: Iterable[tuple[Tensor, Tensor]], beside: Beside
) -> Inputs:
    """Let every batch go as far as the door of a group; return the statistics of its input."""
    accumulators: dict[str, InputsAccumulator] = {}
    valid_BT: Tensor

    def turn_back(reached: Group, x_BTC: Tensor) -> None:
        if reached is group:
            _add(accumulators, group, x_BTC, valid_BT, beside(group, batch))
            raise _AbandonedError

    handles = _hook(block, turn_back)
    try:
        for batch, (hidden_BTD, valid_BT) in enumerate(batches):  # noqa: B007 - read by the hook
            with suppress(_AbandonedError):
                block.forward(hidden_BTD)
    finally:
        for handle in handles:
            handle.remove()
    return accumulators[group.name].result()


def capture_inputs(
    block: Block,
    batches: Iterable[tuple[Tensor, Tensor]],
    keep: Callable[[int, Tensor], None] = lambda k, hidden_BTD: None,
    forward: Callable[[Tensor], Tensor] | None = None,
    beside: Beside = alone,
) -> dict[str, Inputs]:
    """Pass batches through a block as it is and `keep` what comes out; return the statistics."""
    accumulators: dict[str, InputsAccumulator] = {}
    valid_BT: Tensor
    k: int

    def accumulate(group: Group, x_BTC: Tensor) -> None:
        _add(accumulators, group, x_BTC, valid_BT, beside(group, k))

    with visited(block, accumulate) as restart:
        for k, (hidden_BTD, valid_BT) in enumerate(batches):  # noqa: B007 - read by the hook
            restart()
            keep(k, (forward or block.forward)(hidden_BTD))
    return {name: accumulator.result() for name, accumulator in accumulators.items()}


@contextmanager
def visited(block: Block, visit: Callable[[Group, Tensor], None]) -> Iterator[Callable[[], None]]:
    """Call `visit` with what each group reads, once: q, k and v read the same input.

    What is yielded is to be called before each batch.
    """
    seen: set[str] = set()

    def visit_once(group: Group, x_BTC: Tensor) -> None:
        if group.name not in seen:
            seen.add(group.name)
            visit(group, x_BTC)

    handles = _hook(block, visit_once)
    try:
        yield seen.clear
    finally:
        for handle in handles:
            handle.remove()


def _hook(
    block: Block, visit: Callable[[Group, Tensor], None]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Call `visit` whenever a linear is about to read its input."""
    handles = []
    for group in block.groups:
        for name in group.linears:

            def before(_: nn.Module, args: tuple[Tensor, ...], group: Group = group) -> None:
                visit(group, args[0])

            handles.append(block.module.get_submodule(name).register_forward_pre_hook(before))
    return handles


def _gather(
    group: Group, walkers: Sequence[_Walker], valids: Sequence[Tensor], beside: Beside
) -> Inputs:
    accumulators: dict[str, InputsAccumulator] = {}
    for k, (walker, valid_BT) in enumerate(zip(walkers, valids, strict=True)):
        _add(accumulators, group, walker.at_door(group), valid_BT, beside(group, k))
    return accumulators[group.name].result()


def _add(
    accumulators: dict[str, InputsAccumulator],
    group: Group,
    x_BTC: Tensor,
    valid_BT: Tensor,
    full_BTC: Tensor | None,
) -> None:
    def rows(x: Tensor) -> Tensor:
        return x[valid_BT.to(x.device)] if not bool(valid_BT.all()) else x.flatten(0, -2)

    if group.name not in accumulators:
        accumulators[group.name] = InputsAccumulator(x_BTC.shape[-1], x_BTC.device)
    accumulators[group.name].add(rows(x_BTC), None if full_BTC is None else rows(full_BTC))


class _Walker(threading.Thread):
    """One batch on its way through the block. Runs only between `start`/`resume` and a door."""

    def __init__(self, block: Block, hidden_BTD: Tensor) -> None:
        super().__init__(daemon=True)
        self._block = block
        self._hidden_BTD: Tensor | None = hidden_BTD
        self._baton = threading.Semaphore(0)  # released to let the batch walk
        self._stopped = threading.Semaphore(0)  # released when it stands at a door or is out
        self._door: tuple[str, Tensor] | None = None
        self._passed: set[str] = set()
        self._outcome: Tensor | BaseException | None = None
        self._abandoned = False

    def start(self) -> None:
        """Walk to the first door."""
        super().start()
        self._stopped.acquire()

    def resume(self) -> None:
        """Walk to the next door, or out."""
        self._door = None
        self._baton.release()
        self._stopped.acquire()

    def at_door(self, group: Group) -> Tensor:
        """Return the input with which the batch stands at the door of `group`."""
        self._raise()
        if self._door is None or self._door[0] != group.name:
            standing = self._door[0] if self._door else "the exit"
            raise AssertionError(f"a batch stands at {standing}, not at `{group.name}`")
        return self._door[1]

    def result(self) -> Tensor:
        """Return what came out of the block."""
        self._raise()
        assert isinstance(self._outcome, Tensor)
        self.join()
        return self._outcome

    def abandon(self) -> None:
        """End the walk early, after a failure elsewhere."""
        if self.is_alive():
            self._abandoned = True
            self._baton.release()
            self.join()

    def visit(self, group: Group, x_BTC: Tensor) -> None:
        """Stop at the door of a group when its first linear is about to read."""
        if group.name in self._passed:
            return
        self._passed.add(group.name)
        self._door = (group.name, x_BTC)
        self._stopped.release()
        self._baton.acquire()
        if self._abandoned:
            raise _AbandonedError

    def run(self) -> None:
        """Run the block; hooks stop it at the doors."""
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
        self._handles = _hook(block, self._visit)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for walker in self._walkers:
            walker.abandon()
        for handle in self._handles:
            handle.remove()

    def _visit(self, group: Group, x_BTC: Tensor) -> None:
        walker = threading.current_thread()
        assert isinstance(walker, _Walker)
        walker.visit(group, x_BTC)
