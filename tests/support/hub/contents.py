"""Where the bytes of a served file come from: memory, disk, or disk varied by a rule.

The third is what makes a repo with a thousand revisions cheap: every name serves weights of its
own, and the disk holds them once. Anything may be read from the middle, so that ranges work.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

CHUNK_NBYTES = 256 * 1024
PERIOD_NBYTES = 4096
DTYPE_NBYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}


class Contents(Protocol):
    """Bytes of known number that can be read from anywhere."""

    @property
    def nbytes(self) -> int: ...

    def read(self, start: int, stop: int) -> Iterator[bytes]: ...


@dataclass(frozen=True)
class InMemory:
    """Bytes as they are."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` to `stop` in pieces."""
        for position, count in _pieces(start, stop):
            yield self.data[position : position + count]


@dataclass(frozen=True)
class OnDisk:
    """A file as it is when it is read."""

    path: Path
    nbytes: int

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` to `stop` in pieces."""
        with self.path.open("rb") as file:
            file.seek(start)
            for _, count in _pieces(start, stop):
                yield file.read(count)


@dataclass(frozen=True)
class Varied:
    """A file whose data, behind its header, differs from name to name.

    The low six bits of every other byte are those of the file xor some of the name's. In a
    tensor of bfloat16, float16 or float32 that moves the mantissa alone: what was finite stays
    finite and near to what it was, so that the weights can be used. What the file lacks is zero
    before that, so a file that ends behind its header, or a pretended size, can be read to the end.
    """

    path: Path
    name: str
    header_nbytes: int
    nbytes: int

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` to `stop` in pieces."""
        pattern = np.frombuffer(hashlib.shake_128(self.name.encode()).digest(PERIOD_NBYTES), "u1")
        pattern = pattern & np.tile(np.array([0x3F, 0], dtype="u1"), PERIOD_NBYTES // 2)
        with self.path.open("rb") as file:
            for position, count in _pieces(start, stop):
                file.seek(position)
                data = np.frombuffer(file.read(count).ljust(count, b"\0"), "u1")
                index = np.arange(position, position + count) - self.header_nbytes
                mask = np.where(index >= 0, pattern[index % PERIOD_NBYTES], 0).astype("u1")
                yield (data ^ mask).tobytes()


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for position in range(start, stop, CHUNK_NBYTES):
        yield position, min(CHUNK_NBYTES, stop - position)


def extent_of(path: Path) -> tuple[int, int]:
    """Return where a file's data may be varied from, and how many bytes it then has.

    A safetensors file is as long as its header says, even where the file ends before; any other
    format is left alone and followed by a few bytes of the name's.
    """
    if path.suffix == ".safetensors":
        return header_of(path)
    nbytes = path.stat().st_size
    return nbytes, nbytes + 64


# ---------------------------------------------- safetensors headers without data


def header_of(path: Path) -> tuple[int, int]:
    """Return the bytes of a safetensors header, and those of the file that it describes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + length, 8 + length + max(ends, default=0)


def write_header(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Write a safetensors file that ends behind its header; return what it would be long."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPE_NBYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return 8 + len(text) + end


def write_headers(
    folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], shard_nbytes: int
) -> int:
    """Write a sharded checkpoint of headers and its index; return what it would weigh.

    A few kilobytes that describe a model of any size, for `Hub.add_names`.
    """
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    room = shard_nbytes
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * DTYPE_NBYTES[dtype]
        if nbytes > room and shards[-1]:
            shards.append({})
            room = shard_nbytes
        shards[-1][name] = (dtype, shape)
        room -= nbytes
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    total = sum(write_header(folder / n, shard) for n, shard in zip(names, shards, strict=True))
    weight_map = {t: n for n, shard in zip(names, shards, strict=True) for t in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total
