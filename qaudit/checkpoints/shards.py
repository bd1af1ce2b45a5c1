"""The files of an export, put together from parts without holding a tensor.

Bytes are copied as they are. Wider types come first in a shard, as safetensors itself orders them,
so that every tensor is aligned.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from qaudit.checkpoints.header import ITEMSIZE, TensorInfo, cut_short, header_nbytes, tensors_in
from qaudit.checkpoints.safetensors import INDEX, SINGLE
from qaudit.whole import open_regular

_PIECE = 1 << 24


_T = TypeVar("_T")


@dataclass(frozen=True)
class _Source:
    name: str
    info: TensorInfo
    path: Path


def write_shards(parts: Sequence[Path], folder: Path, shard_nbytes: int) -> None:
    sources = [source for path in parts for source in _sources(path)]
    shards = list(grouped(sources, lambda source: source.info.nbytes, shard_nbytes))
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = shard_name(number, len(shards))
        _write(shard, folder / file)
        where |= {source.name: file for source in shard}
    write_index(folder, where, sum(source.info.nbytes for source in sources))


def grouped(items: Iterable[_T], nbytes: Callable[[_T], int], limit: int) -> Iterator[list[_T]]:
    """Yield the tensors of each shard; a tensor is never split, so one may be over the limit."""
    shard: list[_T] = []
    total = 0
    for item in items:
        if shard and total + nbytes(item) > limit:
            yield shard
            shard, total = [], 0
        shard.append(item)
        total += nbytes(item)
    if shard:
        yield shard


def shard_name(number: int, count: int) -> str:
    """Return the name of a file of weights; one alone has no number."""
    return SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def write_index(folder: Path, where: Mapping[str, str], nbytes: int) -> None:
    if len(set(where.values())) > 1:
        index = {"metadata": {"total_size": nbytes}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _sources(path: Path) -> list[_Source]:
    size = path.stat().st_size
    with open_regular(path) as file:
        header = file.read(header_nbytes(path, file.read(8), size))
    return [_Source(name, info, path) for name, info in tensors_in(path, header, size).items()]


def _write(shard: Sequence[_Source], path: Path) -> None:
    ordered = sorted(shard, key=lambda source: (-ITEMSIZE[source.info.dtype], source.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for source in ordered:
        offsets = [end, end + source.info.nbytes]
        shape = list(source.info.shape)
        entries[source.name] = {"dtype": source.info.dtype, "shape": shape, "data_offsets": offsets}
        end = offsets[1]
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        for source in ordered:
            with open_regular(source.path) as file:
                file.seek(source.info.start)
                remaining = source.info.nbytes
                while remaining:
                    piece = file.read(min(remaining, _PIECE))
                    if not piece:
                        raise cut_short(source.path, expected=source.info.nbytes, found=remaining)
                    remaining -= len(piece)
                    out.write(piece)
