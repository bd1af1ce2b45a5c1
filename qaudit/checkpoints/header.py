"""The header of a safetensors file: read and checked without torch, wherever the file is.

A file is eight bytes of header length, a JSON header, and raw little-endian tensors that fill
the rest of the file without gaps. Plans and reports need shapes and no arithmetic, so nothing
here imports torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import PurePath
from typing import Any

from qaudit.errors import SourceError

ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

LONGEST_HEADER_NBYTES = 100_000_000  # the format's own limit
DAMAGED = "download the file again; it is damaged or was cut short"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is in its file, and what it is."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int  # byte offset in the file
    nbytes: int


def damaged(what: str) -> SourceError:
    return SourceError(what, hint=DAMAGED)


def not_read(path: PurePath, error: OSError) -> SourceError:
    why = (error.strerror or str(error)).lower()
    return SourceError(f"`{path}` cannot be read: {why}", hint="check that the file may be read")


def cut_short(path: PurePath, *, expected: int, found: int) -> SourceError:
    return damaged(f"`{path}` is cut short: {expected} bytes expected, {found} found")


def header_nbytes(path: PurePath, first: bytes, size: int) -> int:
    if len(first) < 8:
        raise cut_short(path, expected=8, found=size)
    length = int.from_bytes(first[:8], "little")
    if length > LONGEST_HEADER_NBYTES:
        raise damaged(f"`{path}` is not a safetensors file")
    if 8 + length > size:
        raise cut_short(path, expected=8 + length, found=size)
    return length


def tensors_in(path: PurePath, header: bytes, size: int) -> dict[str, TensorInfo]:
    """Read the header of a file of `size` bytes, wherever the file is.

    Tensors that share bytes are refused, and bytes that belong to no tensor.
    """
    base, infos = 8 + len(header), {}
    for name, entry in _read_json(path, header).items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(map(_whole, entry["shape"]))
            start, end = map(_whole, entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(f"the header of `{path}` does not describe tensor `{name}`") from error
        if dtype not in ITEMSIZE:
            raise SourceError(
                f"tensor `{name}` in `{path}` is stored as `{dtype}`, which is not known here",
                hint="store weights as bf16, fp16 or fp32",
            )
        nbytes, actual = prod(shape) * ITEMSIZE[dtype], end - start
        if actual != nbytes:
            raise damaged(
                f"tensor `{name}` in `{path}` has {actual} bytes where its shape needs {nbytes}"
            )
        infos[name] = TensorInfo(dtype, shape, path.name, base + start, nbytes)
    end = base
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if info.start < end:
            raise damaged(f"tensor `{name}` in `{path}` shares bytes with another")
        if info.start > end:
            raise damaged(
                f"{info.start - end} bytes before tensor `{name}` in `{path}` belong to no tensor"
            )
        end = info.start + info.nbytes
    if end > size:
        raise cut_short(path, expected=end, found=size)
    if end < size:
        raise damaged(f"`{path}` has {size - end} bytes behind its last tensor")
    return infos


def metadata_in(path: PurePath, header: bytes) -> dict[str, str]:
    """Read the texts that a header has beside its tensors."""
    metadata = _read_json(path, header).get("__metadata__") or {}
    if not isinstance(metadata, dict) or not all(isinstance(t, str) for t in metadata.values()):
        raise damaged(f"the metadata of `{path}` is not a table of texts")
    return metadata


def _read_json(path: PurePath, text: bytes) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise damaged(f"`{path}` names a tensor twice")
        return entries

    try:
        entries = json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise damaged(f"the header of `{path}` is not JSON") from error
    if not isinstance(entries, dict):
        raise damaged(f"the header of `{path}` is not a table of tensors")
    return entries


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError("not a count")
    return value
