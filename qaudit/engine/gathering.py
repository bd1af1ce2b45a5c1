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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qaudit.core.gram import InputsAccumulator
from qaudit.core.linears import Inputs
from qaudit.model.blocks import Block, Group
from qaudit.model.device import upload
from qaudit.model.experts import Experts, Routed

Read = Tensor | Routed
"""What a door is given of a batch: a tensor, or tokens with the experts that read them."""

Beside = Callable[[Group, int], Tensor | None]
"""Return a door's input in full precision for a batch, or None where it is unused."""


def alone(group: Group, batch: int) -> None:
    """Ask for nothing of full precision."""


def without_padding(read: Read, valid_BT: Tensor) -> Read:
    """Return a read with its padding marked, where it has experts; a tensor as it is."""
    return read.only(valid_BT.flatten()) if isinstance(read, Routed) else read


def gathered(
    block: Block, group: Group, batches: Callable[[], Iterable[tuple[Read, Tensor, Tensor | None]]]
) -> Inputs:
    """Return a group's moments over batches of (read, valid, read in full precision)."""
    sums = Sums()
    for read, valid_BT, full in batches():
        sums.add(block, group, read, valid_BT, full)
    if group.expert is not None and block.experts.see_all:
        sums = Sums(seen=sums.tokens)
        for read, valid_BT, full in batches():
            assert isinstance(read, Routed)
            sums.add(block, group, for_everyone(read), valid_BT, full)
    return sums.inputs(block, group)


def for_everyone(read: Routed) -> Routed:
    """Return a read in which every expert reads every token, where that can be had."""
    if read.everyone is None:
        return read
    everyone = (read.everyone,) * len(read.rows)
    return replace(read, rows=everyone, tokens=everyone)


@dataclass(eq=False)
class Sums:
    """The moments of one group: while they are summed, and then as they came out."""

    accumulator: InputsAccumulator | None = None
    result: Inputs | None = None
    tokens: int = 0
    seen: int | None = None  # tokens routed to an expert that is given all

    def add(
        self, block: Block, group: Group, read: Read, valid_BT: Tensor, full: Tensor | None
    ) -> None:
        if isinstance(read, Routed):
            x, full = expert_inputs(block, group, read, full)
        else:
            x, full = _rows(read, valid_BT), None if full is None else _rows(full, valid_BT)
        if self.accumulator is None:
            self.accumulator = InputsAccumulator(x.shape[-1], x.device)
        self.accumulator.add(x, full)
        self.tokens += x.shape[:-1].numel()

    def inputs(self, block: Block, group: Group) -> Inputs:
        if self.result is None:
            assert self.accumulator is not None, f"no batch came to `{group.name}`"
            inputs = self.accumulator.result()
            self.accumulator = None
            if group.expert is not None:
                inputs = enough(inputs)
                inputs = replace(inputs, seen=inputs.seen if self.seen is None else self.seen)
            self.result = inputs
        return self.result


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
    part = group.expert
    assert part is not None
    experts = block.module.get_submodule(part.module)
    assert isinstance(experts, Experts)
    expert, rows_T = experts.expert(part.index), read.rows[part.index]
    x_TH = read.hidden_NH[rows_T]
    full_TH = None
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

    On the identity calibrated schemes round to nearest. Columns that
    no token moved are not dead, as they are in a dense model: zeroing them loses more than rounding
    to nearest, so that they keep their weights as if they were independent.
    """
    columns = len(inputs.gram_CC)
    if not inputs.tokens:
        one_C = torch.ones(columns, device=inputs.gram_CC.device)
        return Inputs(torch.diag(one_C), one_C, 1, one_C, None, one_C[None], seen=inputs.tokens)
    diagonal_C = inputs.gram_CC.diagonal()
    unmoved_C = diagonal_C == 0
    if bool(unmoved_C.any()):
        diagonal_C[unmoved_C] = diagonal_C.mean().clamp(min=1e-12)
    return replace(inputs, seen=inputs.tokens)


@dataclass(eq=False)
class Captured:
    """What groups of a block read of batches that went through it once."""

    block: Block
    beside: Beside
    sums: dict[str, Sums] = field(default_factory=dict)  # by dense group
    routed: dict[str, list[Routed]] = field(default_factory=dict)  # by door, batch by batch

    def add(self, door: str, read: Read, valid_BT: Tensor, k: int) -> None:
        group = self.block.doors[door][0]
        if isinstance(read, Routed):
            self.routed.setdefault(door, []).append(read.only(valid_BT.flatten()))
        else:
            sums = self.sums.setdefault(group.name, Sums())
            sums.add(self.block, group, read, valid_BT, self.beside(group, k))

    def take(self, group: Group) -> Inputs:
        inputs = self.get(group)
        self.sums.pop(group.name, None)
        return inputs

    def get(self, group: Group) -> Inputs:
        """Return a group's moments as the block was when the batches went through it."""
        if group.expert is None:
            return self.sums[group.name].inputs(self.block, group)
        batches = self.routed[group.door]
        nothing = torch.empty(0, dtype=torch.bool)
        with self.block.as_it_was(group.expert.before):
            return gathered(
                self.block,
                group,
                lambda: ((read, nothing, self.beside(group, k)) for k, read in enumerate(batches)),
            )


def capture_inputs(
    block: Block,
    batches: Iterable[tuple[Tensor, Tensor]],
    keep: Callable[[int, Tensor], None] = lambda k, hidden_BTD: None,
    beside: Beside = alone,
) -> Captured:
    """Pass batches through a block as it is and `keep` what comes out; return what groups read."""
    captured = Captured(block, beside)
    valid_BT: Tensor
    k: int

    def add(door: str, read: Read) -> None:
        captured.add(door, read, valid_BT, k)

    with visited(block, add) as restart:
        for k, (hidden_BTD, valid_BT) in enumerate(batches):  # noqa: B007 - read by the hook
            restart()
            keep(k, block.forward(hidden_BTD))
    return captured


@contextmanager
def visited(block: Block, visit: Callable[[str, Read], None]) -> Iterator[Callable[[], None]]:
    """Call `visit` with what each door is given, once: q, k and v read the same input.

    What is yielded is to be called before each batch.
    """
    seen: set[str] = set()

    def visit_once(door: str, read: Read) -> None:
        if door not in seen:
            seen.add(door)
            visit(door, read)

    with hooked(block, visit_once):
        yield seen.clear


@contextmanager
def hooked(block: Block, visit: Callable[[str, Read], None]) -> Iterator[None]:
    """Call `visit` whenever a linear, or the experts of a layer, are about to read their input."""
    handles: list[RemovableHandle] = []
    for door, groups in block.doors.items():
        part = groups[0].expert
        for name in groups[0].linears if part is None else (part.module,):

            def before(
                module: nn.Module,
                args: tuple[Tensor, ...],
                kwargs: Mapping[str, Tensor],
                door: str = door,
            ) -> None:
                if isinstance(module, Experts):
                    visit(door, module.routed(*args, *kwargs.values()))
                else:
                    visit(door, args[0])

            module = block.module.get_submodule(name)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
