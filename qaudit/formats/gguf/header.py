"""The header of a GGUF file: read and checked without torch and without any library; its bits.

A file is the letters `GGUF`, a version, two counts, metadata as typed values under names, then
names, shapes, types and offsets of tensors, and behind an alignment the tensors. All of it comes
from a stranger: lengths and counts are bounded by the bytes that are there before anything is
made of them.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path, PurePath
from typing import Any

from qaudit.checkpoints.header import not_read
from qaudit.errors import MachineError, SourceError
from qaudit.formats.reading import most_bits
from qaudit.support.keys import install
from qaudit.whole import open_regular

MAGIC = b"GGUF"
DAMAGED = "download the file again; it is damaged or was cut short"

_FIRST_NBYTES, _LARGEST_HEADER_NBYTES = 1 << 21, 256_000_000
_VERSIONS = (2, 3)
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LARGEST_SIDE = 1 << 40
_MOST_DIMENSIONS = 4

_GUESSED = 1024  # a flag in `general.file_type`
_CLAIM = re.compile(r"(?:^|[-_.])(I?Q\d|TQ\d|MXFP4|NVFP4)(?=[-_.]|$)", re.IGNORECASE)
PLAIN = ("F32", "F16", "BF16")
HEAD, EMBEDDINGS = "output.weight", "token_embd.weight"


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is in its file, and what it is; the first side is that of the rows."""

    name: str
    kind: int  # a number of ggml's types
    shape: tuple[int, ...]  # as torch has it: rows, columns
    start: int  # byte offset in the file


@dataclass(frozen=True, eq=False)
class GgufHeader:
    """What a file says of itself."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))[:60]

    def number(self, key: str) -> float | None:
        """Return a number of this architecture; None where there is none."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value if math.isfinite(value) else None

    def largest(self, key: str) -> float | None:
        """Return a number, or the largest of those of blocks."""
        values = self.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(values, list):
            return self.number(key)
        whole = [value for value in values if type(value) is int]
        return max(whole, default=None)


def read_header(path: Path) -> GgufHeader:
    try:
        size = path.stat().st_size
        with open_regular(path) as file:

            def first(count: int) -> bytes:
                file.seek(0)
                return file.read(count)

            return header_by(path, size, first)
    except OSError as error:
        raise not_read(path, error) from error


def header_by(path: PurePath, size: int, first: Callable[[int], bytes]) -> GgufHeader:
    """Read the header of a file of `size` bytes: a few of the first, and more where they end."""
    count = _FIRST_NBYTES
    while True:
        stop = min(count, size, _LARGEST_HEADER_NBYTES)
        try:
            return header_in(path, first(stop), size)
        except Short:
            if stop < count:
                raise
            count *= 4


class Short(SourceError):
    """The bytes end before the header does."""


def header_in(path: PurePath, data: bytes, size: int) -> GgufHeader:
    """Read the header at the beginning of a file of `size` bytes."""
    reader = _Reader(path, data)
    if reader.take(4) != MAGIC:
        raise SourceError(f"`{path}` is not a GGUF file", hint=DAMAGED)
    if (version := reader.number("I")) not in _VERSIONS:
        swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in _VERSIONS
        raise SourceError(
            f"`{path}` is a GGUF file of {'big-endian numbers' if swapped else 'another version'}",
            hint="convert the model again with a current llama.cpp, on this kind of machine",
        )
    count, pairs = reader.number("Q"), reader.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = reader.text()
        if key in metadata:
            raise reader.damaged(f"names `{key[:60]}` twice")
        metadata[key] = reader.value(int(reader.number("I")))
    tensors: dict[str, GgufTensor] = {}
    for _ in range(count):
        info = reader.tensor()
        if info.name in tensors:
            raise reader.damaged(f"names the tensor `{info.name[:60]}` twice")
        tensors[info.name] = info
    if not tensors:
        raise SourceError(f"`{path}` holds no tensors", hint=DAMAGED)
    unit = metadata.get("general.alignment", 32)
    if type(unit) is not int or not 0 < unit <= 1 << 20 or unit & (unit - 1):
        raise reader.damaged("has an alignment that is no power of two")
    start = -(-reader.at // unit) * unit
    for name, info in tensors.items():
        tensors[name] = replace(info, start=start + info.start)
        if start + info.start > size:
            raise reader.damaged(f"is cut short: `{name[:60]}` is behind its end")
    return GgufHeader(metadata, tensors)


class _Reader:
    """Takes values from bytes, none of which are believed."""

    def __init__(self, path: PurePath, data: bytes) -> None:
        self.path, self.data, self.at = path, data, 0

    def damaged(self, what: str) -> SourceError:
        return SourceError(f"`{self.path}` {what}", hint=DAMAGED)

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise Short(f"the header of `{self.path}` is cut short", hint=DAMAGED)
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise self.damaged(f"has metadata of an unknown type, {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind != _STRING and kind not in _NUMBERS:
            raise self.damaged("has arrays in arrays, or of an unknown type")
        nbytes = 8 if kind == _STRING else struct.calcsize(f"<{_NUMBERS[kind]}")
        if count * nbytes > len(self.data) - self.at:  # before anything is made of a count
            raise Short(f"the header of `{self.path}` is cut short", hint=DAMAGED)
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        return list(struct.unpack(f"<{count}{_NUMBERS[kind]}", self.take(count * nbytes)))

    def tensor(self) -> GgufTensor:
        name, dimensions = self.text(), self.number("I")
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            raise self.damaged(f"has a tensor of {dimensions} dimensions, `{name[:60]}`")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        if 0 in shape or prod(shape) > _LARGEST_SIDE:
            raise self.damaged(f"has a tensor of an impossible shape, `{name[:60]}`")
        return GgufTensor(name, self.number("I"), shape, self.number("Q"))


# ------------------------------------------------------------------- the bits of a file


def library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MachineError(
            "GGUF files are read by the `gguf` package", hint=install("gguf")
        ) from error
    return gguf


def bits_claimed(header: GgufHeader, path: PurePath) -> int | None:
    """Return the bits of the type that a file says it is of, as 4 of `Q4_K_M`.

    Where rows do not divide by 256, as in small models, llama.cpp stores most of them in a type of
    more bits, and the file is a `Q4_K_M` all the same: people choose between files by that name.
    """
    number = header.metadata.get("general.file_type")
    names = {int(kind): kind.name for kind in library().LlamaFileType}
    name = names.get(number & ~_GUESSED, "") if type(number) is int else ""
    if name.startswith("MOSTLY_") and name not in ("MOSTLY_F16", "MOSTLY_BF16"):
        return bits_of(name.removeprefix("MOSTLY_"))
    claim = _CLAIM.search(path.stem)
    return bits_of(claim[1].upper()) if claim else None


def bits_in(header: GgufHeader, path: PurePath) -> int:
    """Return the bits that a file claims or that most codes have, by the header alone."""
    kinds = {int(k): k.name for k in library().GGMLQuantizationType}
    quantized = [
        (bits_of(kinds[info.kind]), info.shape)
        for name, info in header.tensors.items()
        if name not in (HEAD, EMBEDDINGS) and kinds.get(info.kind, "F32") not in PLAIN
    ]
    if not quantized:
        raise SourceError(
            "no linear of the GGUF file is quantized",
            hint="name its full-precision model as a target, not with `--shipped`",
        )
    return bits_claimed(header, path) or most_bits(quantized)


def bits_of(kind: str) -> int:
    """Return the bits of a code, which names of types hold."""
    digits = re.search(r"\d+", kind.removeprefix("MX").removeprefix("NV"))
    return int(digits[0]) if digits else 8
