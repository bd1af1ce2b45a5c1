"""Where the tensors of a checkpoint are: headers of safetensors files, metadata of torch's DCP.

A file is eight bytes of header length, a JSON header, and raw little-endian tensors that fill
the rest of the file without gaps. Plans and reports need shapes and no arithmetic, so nothing
here imports torch to know them.

Distributed checkpoints (DCP), as FSDP leaves them, are `.metadata` and `__0_0.distcp`. The metadata
is a pickle, and opening it with Python's own loader would run what is in it. Here the few classes
that torch writes into it are read as plain records, and every other name is refused, so that
neither torch nor an option is needed to plan. A tensor is put together from its pieces, each of
which `torch.load` reads with `weights_only=True`.

Trainer and accelerate keep the model in `pytorch_model_fsdp_0` beside the optimizer; a folder that
`torch.distributed.checkpoint.save` wrote has the files itself. What is under `model` is the model,
or everything, where nothing is.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any

from qaudit.checkpoints.configuration import METADATA, unreadable
from qaudit.errors import SourceError
from qaudit.support.foreign import json_of
from qaudit.support.lazy import Tensor, torch
from qaudit.whole import open_regular, read_regular

ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

TORCH_NAMES = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U32": "uint32",
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
    for name, entry in table_in(path, header).items():
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


def table_in(path: PurePath, text: bytes) -> dict[str, Any]:
    """Read the table that a header is, before anything in it is checked."""
    try:
        entries = json_of(text.decode())
    except ValueError as error:
        raise damaged(f"the header of `{path}` cannot be read: {error}") from error
    if not isinstance(entries, dict):
        raise damaged(f"the header of `{path}` is not a table of tensors")
    return entries


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError("not a count")
    return value


# ------------------------------------------------------------ distributed checkpoints

_LARGEST_NBYTES = 512_000_000  # of metadata; 100,000 tensors in 64 pieces each take a tenth of it
_DCP_DAMAGED = "save the checkpoint again, or convert it to safetensors where it was made"


class _Record:
    """A value of a class of torch, with its fields as they were pickled."""

    def __setstate__(self, state: Any) -> None:
        """Keep fields by name, or the plain tuple that properties of tensors are pickled as."""
        self.__dict__.update(state if isinstance(state, dict) else {"values": state})


_PACKAGE = "torch.distributed.checkpoint"
_WRITTEN = {
    **{
        f"{_PACKAGE}.metadata.{name}": _Record
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "MetadataIndex", "StorageMeta",
        )
    },
    f"{_PACKAGE}.filesystem._StorageInfo": _Record,
    f"{_PACKAGE}.metadata._MEM_FORMAT_ENCODING": lambda value=None: value,
    "torch.serialization._get_layout": lambda value=None: value,
    "torch.Size": tuple,
    "pathlib.PosixPath": lambda *parts: "/".join(parts),
    "pathlib.PurePosixPath": lambda *parts: "/".join(parts),
    **{f"torch.{name}": dtype for dtype, name in TORCH_NAMES.items()},
}  # fmt: skip
"""Everything that torch writes into the metadata, and what is made of it here."""


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name; refuse every other one."""
        if f"{module}.{name}" not in _WRITTEN:
            raise pickle.UnpicklingError(f"it names `{module}.{name}`")
        return _WRITTEN[f"{module}.{name}"]


class DcpFolder:
    """The tensors of a distributed checkpoint, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        what = f"`{folder / METADATA}` cannot be read as torch's"
        with unreadable(what, _DCP_DAMAGED, SourceError):
            raw = read_regular(folder / METADATA, _LARGEST_NBYTES)
            self.infos, self._pieces = _tensors(_Metadata(io.BytesIO(raw)).load())
        if "tok_embeddings.weight" in self.infos:
            raise SourceError(
                f"`{folder}` has torchtitan's names of tensors, not those of transformers",
                hint="convert it in a clone of torchtitan: `python "
                f"scripts/checkpoint_conversion/convert_to_hf.py {folder} OUT --hf_assets_path "
                "HF_FOLDER --model_name NAME --model_flavor SIZE`, and put `config.json` beside it",
            )

    def read(self, name: str) -> Tensor:
        info = self.infos[name]
        dtype = getattr(torch, TORCH_NAMES[info.dtype])
        tensor = torch.empty(info.shape, dtype=dtype)
        for offsets, piece in self._pieces[name]:
            path = self._folder / piece.file
            with unreadable(f"`{path}` cannot be read", _DCP_DAMAGED, SourceError):
                with open_regular(path) as file:
                    file.seek(piece.start)
                    raw = io.BytesIO(file.read(piece.nbytes))
                part = torch.load(raw, map_location="cpu", weights_only=True)
                if not isinstance(part, torch.Tensor):
                    raise ValueError("it is no tensor")
            part = part.detach()
            if part.shape != piece.shape or part.dtype != dtype:
                raise SourceError(
                    f"a piece of tensor `{name}` in `{piece.file}` is {list(part.shape)} of "
                    f"{part.dtype}, and `{METADATA}` says {list(piece.shape)} of {dtype}",
                    hint=_DCP_DAMAGED,
                )
            ends = zip(offsets, piece.shape, strict=True)
            tensor[tuple(slice(start, start + size) for start, size in ends)] = part
        return tensor


_Pieces = list[tuple[tuple[int, ...], TensorInfo]]
"""The parts of a tensor, each behind its place in the tensor."""


def _tensors(metadata: Any) -> tuple[dict[str, TensorInfo], dict[str, _Pieces]]:
    """Return what each tensor of the model is, and its pieces, under its own name."""
    stored = {
        (str(index.fqn), getattr(index, "offset", None)): info  # bytes have no offset
        for index, info in metadata.storage_data.items()
    }
    paths = getattr(metadata, "planner_data", None) or {}
    names = {
        str(full): tuple(map(str, paths.get(full) or (full,)))
        for full, value in metadata.state_dict_metadata.items()
        if hasattr(value, "chunks")
    }
    of_model = {full: path[1:] for full, path in names.items() if path[0] == "model"}
    if any(len(path) == 1 for path in of_model.values()):
        names = {full: path for full, path in of_model.items() if len(path) == 1}
    infos: dict[str, TensorInfo] = {}
    pieces: dict[str, _Pieces] = {}
    for full, (name, *_) in names.items():
        tensor = metadata.state_dict_metadata[full]
        shape = tuple(map(int, tensor.size))
        parts = pieces[name] = []
        values = tensor.properties.__dict__
        dtype = values["values"][0] if "values" in values else values["dtype"]
        for chunk in tensor.chunks:
            offsets, sizes = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
            info = stored[full, offsets]
            file = str(info.relative_path)
            if Path(file).name != file or getattr(info, "transform_descriptors", None):
                raise ValueError(f"`{full}` is in `{file}`, compressed or outside the folder")
            inside = zip(offsets, sizes, shape, strict=True)
            if any(at < 0 or size < 0 or at + size > end for at, size, end in inside):
                raise ValueError(f"a piece of `{full}` is outside its shape {list(shape)}")
            piece = TensorInfo(dtype, sizes, file, int(info.offset), int(info.length))
            parts.append((offsets, piece))
        if sum(prod(piece.shape) for _, piece in parts) != prod(shape):
            raise ValueError(f"the pieces of `{full}` do not fill its shape {list(shape)}")
        file, start = (parts[0][1].file, parts[0][1].start) if parts else (METADATA, 0)
        infos[name] = TensorInfo(dtype, shape, file, start, prod(shape) * ITEMSIZE[dtype])
    return infos, pieces
