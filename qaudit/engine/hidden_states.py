"""Where the hidden states of every stream wait between blocks.

A stream is the same batches of tokens after the blocks passed so far, under one scheme. With
eight schemes there are nine for evaluation and a few for calibration, and together they are
what fills memory, not the model. On a GPU they stay there while they fit, then in host memory
while they fit that; what is left is in files, one for each batch, written from a GPU one batch
late, while it computes the next. Plain reads and writes, not a memory map: mapped pages count as
resident until the kernel drops them, and the promise here is a peak that does not grow.

What blocks leave beside the hidden states of a batch is stored the same way, in streams of its own.
What a model makes of its tokens for its blocks is stored once, with the embedded tokens, where all
streams of that model read it.

Two settings of glibc belong to that promise (`qaudit/host.py`): one arena for all threads from the
start of the process, and large blocks given back once hidden states begin to be spilled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qaudit.errors import MachineError
from qaudit.host import return_large_blocks
from qaudit.model.device import Copies, HostCopy
from qaudit.model.links import GIVEN, beside, leave

if TYPE_CHECKING:
    from qaudit.model.blocks import Block

_HOST = torch.device("cpu")
_SEPARATOR = "\0"  # no path and no scheme has it


class HiddenStates:
    """Named streams of hidden states, in memory up to a limit, in files past it."""

    def __init__(
        self, folder: Path, limit_nbytes: int, device: torch.device, device_limit_nbytes: int = 0
    ) -> None:
        """Keep spilled batches under `folder`.

        `limit_nbytes` is for host memory; a GPU's own has its own limit.
        """
        self._folder = folder
        self._device = device
        self._limits = {_HOST: limit_nbytes}
        if device.type != _HOST.type:
            self._limits = {device: device_limit_nbytes, **self._limits}
        self._copies = Copies(device)
        self._memory: dict[tuple[str, int], HostCopy] = {}  # of a GPU, too
        self._names_of: Counter[int] = Counter()  # of each tensor in memory, by its id
        self._nbytes: Counter[str] = Counter()  # of them, by the type of their device
        self._files: dict[tuple[str, int], _SpilledBatch] = {}
        self._late: list[tuple[Path, HostCopy]] = []  # what a GPU may still copy to the host
        self._names: dict[tuple[str, int], set[str]] = {}  # of what is beside a batch of a stream
        self._opened = 0
        self.nbytes_spilled = 0

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(self, *_: object) -> None:
        for key in [*self._memory, *self._files]:
            self._forget(key)

    def put(self, stream: str, batch: int, hidden_BTD: Tensor) -> None:
        """Store a batch of a stream and what is beside it, over what it was before."""
        tensors = beside(hidden_BTD)
        for name in self._names.get((stream, batch), set()) - tensors.keys():
            path = _beside(stream, name)
            self._names[stream, batch].remove(name)
            self._forget((path, batch))
        for name, tensor in tensors.items():
            of = f"given/{stream}" if name.startswith(GIVEN) else stream
            self._put(_beside(of, name), batch, tensor)
        self._put(stream, batch, hidden_BTD.detach() if tensors else hidden_BTD)

    def get(self, stream: str, batch: int) -> Tensor:
        """Return a batch of a stream, with what is beside it."""
        names = self._names.get((stream, batch), ())
        tensors = {name: self._get(_beside(stream, name), batch) for name in names}
        return leave(self._get(stream, batch), tensors)

    def entering(self, stream: str, embedded: str, block: Block, batch: int) -> Tensor:
        """Return a batch at the entrance of a block; before the first, streams are `embedded`."""
        hidden_BTD = self.get(embedded if block.index == 0 else stream, batch)
        given = {name: self._get(_beside(f"given/{embedded}", name), batch) for name in block.given}
        return leave(hidden_BTD, {**beside(hidden_BTD), **given})

    def drop_given(self, embedded: str, names: Iterable[str]) -> None:
        """Drop what no block reads any more."""
        for name in names:
            self.drop(_beside(f"given/{embedded}", name))

    def _put(self, stream: str, batch: int, hidden_BTD: Tensor) -> None:
        owner, _, name = stream.partition(_SEPARATOR)
        if name:
            self._names.setdefault((owner, batch), set()).add(name)
        key = (stream, batch)
        before = self._release(key)
        if key not in self._files:
            left_gpu = before is not None and before.tensor.device.type == _HOST.type
            for place in [_HOST] if left_gpu else list(self._limits):
                taken = self._taken(hidden_BTD.nbytes, place)
                if self._nbytes[place.type] + taken <= self._limits[place]:
                    in_place = place != _HOST and HostCopy(hidden_BTD.to(place))
                    copy = self._memory[key] = in_place or self._copies.to_host(hidden_BTD)
                    self._names_of[id(copy.tensor)] += 1
                    if self._names_of[id(copy.tensor)] == 1:  # one under two names counts once
                        device = copy.tensor.device
                        self._nbytes[device.type] += self._taken(copy.tensor.nbytes, device)
                    return
            return_large_blocks()
            self._opened += 1
        copy = self._copies.to_host(hidden_BTD.detach())
        new = self._folder / f"{self._opened}-{id(self)}.spill"
        path = self._files[key].path if key in self._files else new
        self._files[key] = _SpilledBatch(path, copy.tensor.shape, copy.tensor.dtype)
        self._write_late()
        self._late.append((path, copy))
        if copy.written is None:
            self._write_late()
        self.nbytes_spilled += hidden_BTD.nbytes

    def _write_late(self) -> None:
        while self._late:
            path, copy = self._late.pop()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(copy.read().contiguous().flatten().view(torch.uint8).numpy().data)
            except OSError as error:
                why = (error.strerror or str(error)).lower()
                raise MachineError(
                    f"{why} while spilling hidden states to `{self._folder}`",
                    hint="free some space, or set a larger `--set stream_memory=SIZE`",
                ) from error

    def _get(self, stream: str, batch: int) -> Tensor:
        copy = self._memory.get((stream, batch))
        if copy is None:
            self._write_late()
            copy = HostCopy(self._files[stream, batch].read())
        if copy.tensor.device.type == self._device.type:
            return copy.tensor
        return self._copies.to_device(copy)

    @property
    def nbytes_inside(self) -> int:
        """Bytes that may wait inside a block where the model computes.

        On a GPU that is what hidden states leave of their limit; a plan for the host adds both.
        """
        limit = self._limits[self._device]
        return limit if self._device == _HOST else limit - self._nbytes[self._device.type]

    def listed(self) -> list[tuple[str, int, torch.Size, torch.dtype]]:
        batches = [(*k, c.tensor.shape, c.tensor.dtype) for k, c in self._memory.items()]
        batches += [(*key, spilled.shape, spilled.dtype) for key, spilled in self._files.items()]
        return sorted(batches, key=lambda entry: entry[:2])

    def rename(self, stream: str, name: str) -> None:
        self.drop(name)
        tables: tuple[dict[tuple[str, int], Any], ...] = (self._memory, self._names, self._files)
        for table in tables:
            for key in [k for k in table if _is_of(k[0], stream)]:
                table[name + key[0].removeprefix(stream), key[1]] = table.pop(key)

    def drop(self, stream: str) -> None:
        for key in [k for k in (*self._memory, *self._files) if _is_of(k[0], stream)]:
            self._forget(key)
        for key in [k for k in self._names if _is_of(k[0], stream)]:
            del self._names[key]

    def _forget(self, key: tuple[str, int]) -> None:
        self._release(key)
        if (spilled := self._files.pop(key, None)) is not None:
            self._late = [late for late in self._late if late[0] != spilled.path]
            spilled.path.unlink(missing_ok=True)

    def _release(self, key: tuple[str, int]) -> HostCopy | None:
        copy = self._memory.pop(key, None)
        if copy is not None:
            self._names_of[id(copy.tensor)] -= 1
            if self._names_of[id(copy.tensor)] == 0:
                del self._names_of[id(copy.tensor)]
                place = copy.tensor.device
                self._nbytes[place.type] -= self._taken(copy.tensor.nbytes, place)
        return copy

    def _taken(self, nbytes: int, place: torch.device) -> int:
        """Return the bytes that a batch takes: pinned ones come in powers of two."""
        is_pinned = place == _HOST and self._device.type == "cuda"
        return 1 << (nbytes - 1).bit_length() if is_pinned else nbytes


class _SpilledBatch(NamedTuple):
    path: Path
    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> Tensor:
        raw = np.fromfile(self.path, np.uint8)
        return torch.from_numpy(raw).view(self.dtype).reshape(self.shape)


def _beside(stream: str, name: str) -> str:
    """Return the stream of what is beside the hidden states of another."""
    return f"{stream}{_SEPARATOR}{name}"


def _is_of(name: str, stream: str) -> bool:
    """Return whether a stream is this one, or beside it."""
    return name == stream or name.startswith(_beside(stream, ""))
