"""Write a GGUF file: that of llama.cpp's converter, with the tensors of an export in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.gguf.blocks import TYPES
from qaudit.errors import SourceError
from qaudit.formats.gguf.base import (
    EMBEDDINGS,
    HEAD,
    adds_one,
    dense_places,
    expert_in,
    heads_of,
    interleave,
    of_text,
)
from qaudit.formats.gguf.header import GgufHeader, read_header
from qaudit.formats.gguf.reading import OF_NO_CONSEQUENCE, library
from qaudit.support.lazy import torch

_WITH_HEAD = ("olmo2",)
"""Architectures whose head llama.cpp wants in the file even if it is the embeddings."""
_FILE_TYPES = {
    "Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18,
}  # fmt: skip
_MIXES = {"Q3_K_M": 12, "Q4_K_M": 15}
"""What llama.cpp prints for a file (`general.file_type`), by mix or else by most weights."""


def names_in(header: GgufHeader, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the dense names of each tensor of a template, several where they are experts.

    There is none for what depends on no weight.
    """
    if len(of_text(names)) < len(names):
        raise SourceError(
            "a GGUF file holds the text of a wrapper alone, and an export all of its tensors",
            hint="name a scheme of integers and `--format compressed-tensors`, or export the text "
            "of the wrapper from a folder that holds it alone",
        )
    members: dict[str, list[str]] = {}
    for name, place in dense_places(header, names, library()).items():
        if place.dense is not None:
            raise SourceError(
                f"`{name}` is stored in another form in GGUF files of `{header.architecture}`, "
                "which are read and not written",
                hint="name a scheme of integers and `--format compressed-tensors`",
            )
        members.setdefault(place.first, []).append(name)
    places = {place: _in_order(place, found) for place, found in members.items()}
    places |= {name: () for name in header.tensors if name in OF_NO_CONSEQUENCE}
    is_tied = HEAD not in places and EMBEDDINGS in places
    if is_tied and (HEAD in header.tensors or header.architecture in _WITH_HEAD):
        places[HEAD] = places[EMBEDDINGS]
    placed = {name for names_of_place in places.values() for name in names_of_place}
    differing = sorted({*(set(header.tensors) - set(places)), *(set(names) - placed)})
    differing = [name for name in differing if name != "lm_head.weight"]  # tied where it is absent
    if differing:
        raise SourceError(
            f"the template and the checkpoint differ: `{differing[0]}` is in one alone",
            hint="make the template of this checkpoint, with llama.cpp's converter",
        )
    return places


def _in_order(place: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of experts by their numbers; refuse two tensors for one place."""
    numbers = {expert_in(name): name for name in names}
    if len(names) > 1 and set(numbers) != set(range(len(names))):
        raise SourceError(
            f"`{names[0]}` and `{names[1]}` are both `{place}` in a GGUF file",
            hint="make the template of this checkpoint, with llama.cpp's converter",
        )
    return tuple(numbers[number] for number in sorted(numbers, key=lambda n: n or 0))


def write_file(mix: str, template: Path, parts: Sequence[Path], out: Path) -> None:
    """Write the template with the tensors of parts in place of its own."""
    gguf = library()
    header, source = read_header(template), gguf.GGUFReader(template)
    places = _Tensors(parts)
    names = names_in(header, places.names())
    writer = gguf.GGUFWriter(out, header.architecture)
    writer.data_alignment = source.alignment
    every = [name for members in names.values() for name in members]
    kinds = [kind for kind in map(places.kind, every) if kind in TYPES]
    most = max(kinds, key=kinds.count)
    changed = {"general.file_type": _MIXES.get(mix, _FILE_TYPES[most])}
    _copy_metadata(writer, source, {**changed, "general.quantization_version": 2}, gguf)
    order = {tensor.name: tensor for tensor in source.tensors}
    for name, dense in names.items():
        if dense:
            shape, dtype, kind = places.described(dense[0])
            if expert_in(dense[0]) is not None:
                shape = (len(dense), *shape)
            raw = gguf.GGMLQuantizationType[kind] if kind in (*TYPES, "BF16") else None
        else:
            shape, dtype, raw = order[name].data.shape, order[name].data.dtype, None
        writer.add_tensor_info(name, shape, dtype, int(prod(shape)) * dtype.itemsize, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, dense in names.items():
        writer.write_tensor_data(places.array(header, name, dense) if dense else order[name].data)
    writer.close()


def _copy_metadata(writer: Any, source: Any, changed: Mapping[str, int], gguf: Any) -> None:
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name in (*changed, "general.architecture"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for name, value in changed.items():
        writer.add_uint32(name, value)


class _Tensors:
    """The tensors of an export by dense names, as a GGUF file stores them."""

    def __init__(self, parts: Sequence[Path]) -> None:
        self._files: dict[str, tuple[WeightFolder, str]] = {}
        for path in parts:
            folder = WeightFolder(path.parent)
            for key in folder.names():
                stem, _, kind = key.rpartition(".")
                self._files[f"{stem}.weight" if kind in TYPES else key] = (folder, key)

    def names(self) -> Sequence[str]:
        return list(self._files)

    def kind(self, name: str) -> str:
        """Return the type in which a tensor is stored; vectors are in float32."""
        folder, key = self._files[name]
        info = folder.infos[key]
        suffix = key.rpartition(".")[2]
        if suffix in TYPES:
            return suffix
        return info.dtype if len(info.shape) > 1 and info.dtype in ("F16", "BF16") else "F32"

    def described(self, name: str) -> tuple[tuple[int, ...], Any, str]:
        """Return the shape and the dtype of what is written, and its type."""
        import numpy as np

        folder, key = self._files[name]
        shape, kind = tuple(folder.shape(key)), self.kind(name)
        if kind == "BF16":
            return (*shape[:-1], 2 * shape[-1]), np.dtype(np.uint8), kind
        dtype = {"F32": np.float32, "F16": np.float16}.get(kind, np.uint8)
        return shape, np.dtype(dtype), kind

    def array(self, header: GgufHeader, place: str, names: Sequence[str]) -> Any:
        """Return the written array of a tensor, as llama.cpp has it."""
        import numpy as np

        heads = heads_of(header, place)
        arrays = [self._array(name, heads) for name in names]
        array = arrays[0] if expert_in(names[0]) is None else np.stack(arrays)
        return array + np.float32(1) if adds_one(header, place) else array

    def _array(self, name: str, heads: int | None) -> Any:
        folder, key = self._files[name]
        tensor, kind = folder.read(key), self.kind(name)
        if kind == "F32":
            tensor = tensor.float()
        elif kind == "BF16":
            tensor = tensor.view(torch.uint8)
        array = tensor.numpy()
        return interleave(array, heads).copy() if heads else array
