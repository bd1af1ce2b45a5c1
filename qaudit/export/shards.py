"""The files of an export, put together from parts without holding a tensor.

Bytes are copied as they are. Wider types come first in a shard, as safetensors itself orders them,
so that every tensor is aligned.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qaudit.checkpoints.header import (
    ITEMSIZE,
    TensorInfo,
    cut_short,
    header_nbytes,
    tensors_in,
)

INDEX = "model.safetensors.index.json"
_PIECE = 1 << 24


@dataclass(frozen=True)
class _Source:
    name: str
    info: TensorInfo
    path: Path


def write_shards(parts: Sequence[Path], folder: Path, shard_nbytes: int) -> dict[str, str]:
    """Write the tensors of all parts into shards, and an index if there are several.

    Return the file of each tensor.
    """
    shards = list(_shards(parts, shard_nbytes))
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        _write(shard, folder / file)
        where |= {source.name: file for source in shard}
    if len(shards) > 1:
        total = sum(source.info.nbytes for shard in shards for source in shard)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return where


def _shards(parts: Sequence[Path], limit: int) -> Iterator[list[_Source]]:
    """Yield the tensors of each shard; a tensor is never split, so one may be over the limit."""
    shard: list[_Source] = []
    nbytes = 0
    for path in parts:
        for source in _sources(path):
            if shard and nbytes + source.info.nbytes > limit:
                yield shard
                shard, nbytes = [], 0
            shard.append(source)
            nbytes += source.info.nbytes
    if shard:
        yield shard


def _sources(path: Path) -> list[_Source]:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(header_nbytes(path, file.read(8), size))
    return [_Source(name, info, path) for name, info in tensors_in(path, header, size).items()]


def _write(shard: Sequence[_Source], path: Path) -> None:
    ordered = sorted(shard, key=lambda source: (-ITEMSIZE[source.info.dtype], source.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for source in ordered:
        offsets = [end, end + source.info.nbytes]
        shape = list(source.info.shape)
        entries[source.name] = {
            "dtype": source.info.dtype,
            "shape": shape,
            "data_offsets": offsets,
        }
        end = offsets[1]
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        for source in ordered:
            with source.path.open("rb") as file:
                file.seek(source.info.start)
                left = source.info.nbytes
                while left:
                    piece = file.read(min(left, _PIECE))
                    if not piece:
                        raise cut_short(source.path, expected=source.info.nbytes, found=left)
                    left -= len(piece)
                    out.write(piece)
