"""Where the hidden states of every stream wait between blocks.

A stream is the same batches of tokens after the blocks passed so far, under one scheme. With
eight schemes there are nine for evaluation and a few for calibration, and together they are
what fills memory, not the model. On a GPU they stay there while they fit, then in host memory
while they fit that; what is left lives in files and is read and written batch by batch, from a GPU
one batch late, while it computes the next. Plain reads and writes, not a memory map: mapped pages
count as resident until the kernel feels like dropping them, and the promise here is a peak that
does not grow.

What blocks leave beside the hidden states of a batch is stored the same way, in streams of its own.
What a model makes of its tokens for its blocks is stored once, with the embedded tokens, where all
streams of that model read it.

Two settings of glibc belong to that promise (`qaudit/host.py`): one arena for all threads from the
start of the process, and large blocks given back once hidden states begin to be spilled.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

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
        """Keep spilled streams under `folder`, one file a stream.

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
        self._files: dict[str, _SpillFile] = {}
        self._names: dict[tuple[str, int], set[str]] = {}  # of what is beside a batch of a stream
        self._opened = 0
        self.nbytes_spilled = 0

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._files):
            self._files.pop(name).close()
        for key in list(self._memory):
            self._release(key)

    def put(self, stream: str, batch: int, hidden_BTD: Tensor) -> None:
        """Store a batch of a stream and what is beside it, over what it was before."""
        tensors = beside(hidden_BTD)
        for name in self._names.get((stream, batch), set()) - tensors.keys():
            path = _beside(stream, name)
            self._names[stream, batch].remove(name)
            self._release((path, batch))
            if path in self._files and self._files[path].forget(batch):
                self._files.pop(path).close()
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
        if stream not in self._files or batch not in self._files[stream].places:
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
        if stream not in self._files:
            return_large_blocks()
            self._opened += 1  # a name is used once: what it stood for may live on renamed
            self._files[stream] = _SpillFile(self._folder / f"{self._opened}-{id(self)}.spill")
        self._files[stream].write(batch, self._copies.to_host(hidden_BTD.detach()))
        self.nbytes_spilled += hidden_BTD.nbytes

    def _get(self, stream: str, batch: int) -> Tensor:
        copy = self._memory.get((stream, batch)) or HostCopy(self._files[stream].read(batch))
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
        for stream, file in self._files.items():
            batches += [(stream, batch, *kind[1:]) for batch, kind in file.places.items()]
        return sorted(batches, key=lambda entry: entry[:2])

    def rename(self, stream: str, name: str) -> None:
        self.drop(name)
        tables: tuple[dict[tuple[str, int], Any], ...] = (self._memory, self._names)
        for table in tables:
            for key in [k for k in table if _is_of(k[0], stream)]:
                table[name + key[0].removeprefix(stream), key[1]] = table.pop(key)
        for file in [k for k in self._files if _is_of(k, stream)]:
            self._files[name + file.removeprefix(stream)] = self._files.pop(file)

    def drop(self, stream: str) -> None:
        for key in [k for k in self._memory if _is_of(k[0], stream)]:
            self._release(key)
        for key in [k for k in self._names if _is_of(k[0], stream)]:
            del self._names[key]
        for name in [k for k in self._files if _is_of(k, stream)]:
            self._files.pop(name).close()

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


class _SpillFile:
    """Batches of one stream in one file; a batch keeps its place for ever."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("w+b", buffering=0)
        self.places: dict[int, tuple[int, torch.Size, torch.dtype]] = {}
        self._end = 0
        self._late: tuple[int, HostCopy] | None = None  # a batch that a GPU may still write

    def forget(self, batch: int) -> bool:
        """Forget a batch; return whether no other is left."""
        if self._late is not None and self._late[0] == batch:
            self._late = None
        self.places.pop(batch, None)
        return not self.places

    def write(self, batch: int, copy: HostCopy) -> None:
        """Write a batch; one that a GPU still writes when the next one comes."""
        self._write_late()
        kind = copy.tensor.shape, copy.tensor.dtype
        if batch not in self.places or self.places[batch][1:] != kind:
            self.places[batch] = (self._end, *kind)
            self._end += copy.tensor.nbytes
        self._late = (batch, copy)
        if copy.written is None:
            self._write_late()

    def _write_late(self) -> None:
        if self._late is None:
            return
        (batch, copy), self._late = self._late, None
        raw = copy.read().contiguous().flatten().view(torch.uint8).numpy()
        try:
            self._file.seek(self.places[batch][0])
            if self._file.write(raw.data) != raw.nbytes:
                raise OSError(errno.ENOSPC, "written in part")
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise MachineError(
                f"no space left on device while spilling hidden states to `{self._path.parent}`",
                hint="free some space, or set a larger `--set stream_memory=SIZE`",
            ) from error

    def read(self, batch: int) -> Tensor:
        if self._late is not None and self._late[0] == batch:
            self._write_late()
        offset, shape, dtype = self.places[batch]
        raw = np.empty(shape.numel() * dtype.itemsize, dtype=np.uint8)
        self._file.seek(offset)
        if self._file.readinto(raw.data) != raw.nbytes:  # type: ignore[attr-defined]
            raise MachineError(
                f"`{self._path}` is shorter than what was spilled to it",
                hint="something else wrote to it: run the same command again",
            )
        return torch.from_numpy(raw).view(dtype).reshape(shape)

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def _beside(stream: str, name: str) -> str:
    """Return the stream of what is beside the hidden states of another."""
    return f"{stream}{_SEPARATOR}{name}"


def _is_of(name: str, stream: str) -> bool:
    """Return whether a stream is this one, or beside it."""
    return name == stream or name.startswith(_beside(stream, ""))
