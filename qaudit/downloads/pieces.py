"""Parts of tensors in files, each replaced as a whole: what a running sum is made of.

The head of a piece holds how many members are in it. A new one is written beside the old one,
flushed, and renamed over it, so that a kill at any moment, or a disk that fills up, leaves the
one or the other and never a mixture. Pieces are large enough that a model has hundreds of them
and not millions, and small enough that the room for one more is nothing beside the sum. Numbers
go through memory slice by slice.

Nothing here imports torch before numbers are read or written: a plan asks how far a sum is.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from qaudit.core import merge as merging
from qaudit.errors import SourceError
from qaudit.whole import partial_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PIECE = 1 << 24
"""Elements of a piece at most; a multiple of a slice, so that slices are cut as in memory."""

Shapes = Mapping[str, tuple[int, ...]]

_HEAD = struct.Struct("<8sIQ16s16s")
_MARK = b"qa-sum\x00\x01"


@dataclass(frozen=True)
class Head:
    """The first bytes of a piece."""

    added: int  # members that are in
    nbytes: int  # of what follows
    dtype: str  # of what follows
    result: str  # of what it ends as

    def packed(self) -> bytes:
        return _HEAD.pack(_MARK, self.added, self.nbytes, self.dtype.encode(), self.result.encode())


@dataclass(frozen=True)
class Piece:
    """The elements from `start` to `stop` of a flat tensor, and the file that is theirs."""

    path: Path
    start: int
    stop: int

    @property
    def head(self) -> Head | None:
        """The head of the file; None where there is no file, or a damaged one."""
        try:
            with self.path.open("rb") as file:
                raw, nbytes = file.read(_HEAD.size), os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return None
        if len(raw) < _HEAD.size:
            return None
        mark, added, length, dtype, result = _HEAD.unpack(raw)
        if mark != _MARK or nbytes != _HEAD.size + length:
            return None
        return Head(added, length, _text(dtype), _text(result))

    @property
    def added(self) -> int:
        head = self.head
        return head.added if head else 0

    def slices(self) -> Iterator[Tensor]:
        """Yield what is in the file, slice by slice; each may be changed."""
        import torch

        head = self.head
        if head is None:
            raise _damaged(self.path)
        dtype = torch_dtype(head.dtype)
        with self.path.open("rb", buffering=0) as file:
            file.seek(_HEAD.size)
            count = self.stop - self.start
            for start in range(0, count or 1, merging.SLICE):
                part = torch.empty(min(merging.SLICE, count - start), dtype=dtype)
                _fill(file, part, self.path)
                yield part

    def write(self, added: int, result: torch.dtype, slices: Iterable[Tensor]) -> None:
        """Replace the numbers in the file, all at once."""
        partial = partial_name(self.path)
        try:
            with partial.open("wb") as file:
                file.seek(_HEAD.size)
                dtype = result
                for part in slices:
                    dtype = part.dtype
                    file.write(_raw(part))
                nbytes = max(file.tell() - _HEAD.size, 0)
                file.seek(0)
                names = [str(one).removeprefix("torch.") for one in (dtype, result)]
                file.write(Head(added, nbytes, *names).packed())
                flush(file)
            partial.replace(self.path)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


class SummedWeights:
    """The tensors of a whole sum; may be read by several threads."""

    def __init__(self, shapes: Shapes, pieces: Mapping[str, Sequence[Piece]]) -> None:
        self._shapes, self._pieces = shapes, pieces

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; those of the first member, whose dtypes they have."""
        return sum(map(self.nbytes_of, self._pieces))

    def nbytes_of(self, name: str) -> int:
        heads = (piece.head for piece in self._pieces[name])
        return sum(head.nbytes for head in heads if head)

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        import torch

        pieces = self._pieces[name]
        head = pieces[0].head
        merged = torch.empty(
            math.prod(self._shapes[name]), dtype=torch_dtype(head.result if head else "")
        )
        for piece in pieces:
            target = merged[piece.start : piece.stop]
            for place, part in zip(target.split(merging.SLICE), piece.slices(), strict=True):
                place.copy_(part)
        return merged.reshape(self._shapes[name])


def torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SourceError(f"a running sum of `{name}` is none", hint="delete it and begin anew")
    return dtype


def flush(file: BinaryIO) -> None:
    """Wait until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raw(part: Tensor) -> memoryview:
    import torch

    return memoryview(part.contiguous().view(torch.uint8).numpy().data)


def _fill(file: BinaryIO, part: Tensor, path: Path) -> None:
    view, done = _raw(part), 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise _damaged(path)
        done += count


def _damaged(path: Path) -> SourceError:
    return SourceError(
        f"the running sum in `{path}` is damaged or gone",
        hint="run the same command again: what is damaged is summed up anew",
    )


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("ascii", "replace")
