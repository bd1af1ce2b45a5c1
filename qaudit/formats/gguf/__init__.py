"""GGUF files, as llama.cpp and what is built on it have them.

Codes are packed here: blocks of the `gguf-` schemes as they are, and 4- and 8-bit symmetric codes
in groups of 32 columns, or of a multiple, as Q4_0 and Q8_0, which are the same grids. Metadata and
the tokenizer come from a file that llama.cpp's own converter made of the same model: one that is
given, or one that the converter is run for. Every tensor of it is replaced.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from qaudit.checkpoints.safetensors import ShardWriter, WeightFolder
from qaudit.checkpoints.stamps import is_gguf
from qaudit.core.gguf import TYPES, GgufBlocks, assembled, interleave
from qaudit.core.linears import Codes, StoredWeight
from qaudit.errors import MachineError, SchemeError, SourceError, UsageError, not_written
from qaudit.formats import packing
from qaudit.formats.gguf import reading
from qaudit.formats.gguf.architectures import ARCHITECTURES
from qaudit.formats.gguf.header import EMBEDDINGS, HEAD, GgufHeader, library, read_header
from qaudit.formats.packing import Document
from qaudit.support.lazy import Tensor, torch

FILE = "model.gguf"
_TEMPLATE = "template.gguf"
_BLOCK = 32
_EXACT = {4: "Q4_0", 8: "Q8_0"}  # bits of symmetric codes
_SECONDS = 3600
_WITH_HEAD = ("olmo2",)
"""Architectures whose head llama.cpp wants in the file even if it is the embeddings."""
_SMALL = ("Q3_K", "Q4_K", "Q5_K")
"""Types that llama.cpp calls small, such as Q4_K_S, where all linears have them."""


class GgufFiles(packing.Format):
    """A file that llama.cpp, ollama and LM Studio load."""

    name: ClassVar[str] = "gguf"
    library: ClassVar[str] = "gguf"
    file: ClassVar[str] = FILE
    mixes_bits: ClassVar[bool] = True
    has_settings: ClassVar[bool] = False
    leaves_out: ClassVar[tuple[str, ...]] = ("lm_head.weight",)  # where it is the embeddings
    holds: ClassVar[tuple[Codes, ...]] = ("gguf",)
    has_embeddings: ClassVar[bool] = True
    loaded_by: ClassVar[packing.Programs] = {"llama.cpp": ()}
    loading: ClassVar[str] = (  # `llama-cli` puts every prompt into a chat
        f'$ llama-completion -m {{place}}/{FILE} -p "The quick brown fox" -n 64 -no-cnv'
    )
    runtimes = (
        packing.Runtime("llama.cpp", "b11549", "rounds activations to 8 bits where it multiplies"),
        packing.Runtime("xllamacpp", "2026.10", "the same library, in a wheel"),
    )

    template: Path | None = None
    converter: Path | None = None

    # --------------------------------------------------------------------------- a linear

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        if isinstance(stored, GgufBlocks):
            return {f"{linear}.{stored.kind}": stored.packed_RB.cpu()}
        codes = packing.integer_codes(linear, stored, self)
        kind = _EXACT.get(codes.bits)
        if kind is None or codes.zeros_RG is not None or codes.group % _BLOCK:
            raise SchemeError(
                f"no type of GGUF holds the codes of `{self.scheme.short}`: Q4_0 and Q8_0 have 4 "
                f"and 8 bits without zero points, in blocks of {_BLOCK}",
                hint=f"export {packing.schemes_of('gguf')}, or a symmetric scheme of 4 or 8 bits "
                "and group=32",
            )
        # Blocks of 32, each under the scale of its group.
        rows, columns = codes.codes_RC.shape
        half_RG = packing.half_scales(linear, codes)
        scale_N = half_RG.repeat_interleave(columns // _BLOCK // half_RG.shape[1], 1).reshape(-1, 1)
        codes_NK = codes.codes_RC.cpu().reshape(-1, _BLOCK)
        parts = {"d": scale_N.contiguous().view(torch.uint8)}
        if kind == "Q4_0":
            parts["low"] = interleave(codes_NK, 4, _BLOCK // 2)
        else:
            parts["codes"] = (codes_NK.to(torch.int16) - 128).to(torch.int8).view(torch.uint8)
        return {f"{linear}.{kind}": assembled(kind, parts).reshape(rows, -1)}

    def as_compared(self, tensor: Tensor) -> Tensor:
        return tensor.float()

    def config(self, outside: Sequence[str], symmetric: bool, dtype: str = "float32") -> Document:
        return {}

    # ------------------------------------------------------------------------- the file

    def use(self, converter: Path | None) -> None:
        """Take what metadata come from: the converter, or a file that it made."""
        if converter is None or not converter.is_file():
            needed = "a GGUF file needs metadata and a tokenizer of llama.cpp's converter"
            raise UsageError(
                f"there is no file `{converter}`" if converter else needed,
                hint="add `--converter llama.cpp/convert_hf_to_gguf.py`, or `--converter` with a "
                "`.gguf` file that it made of this model",
            )
        library()
        self.template, self.converter = converter if is_gguf(converter) else None, converter

    def start(self, source: Path, work: Path, names: Iterable[str]) -> None:
        """Make the template if it has to be made, and refuse one of another model."""
        if self.template is None:
            assert self.converter is not None
            self.template = work / _TEMPLATE
            if not self.template.is_file():
                _convert(self.converter, source, self.template)
        header = read_header(self.template)
        reading.must_match(str(self.template), header, source, self.template)
        if header.architecture not in ARCHITECTURES:
            raise SourceError(
                f"the order of rows in GGUF files of `{header.architecture}` is not known here",
                hint=f"these are written: {', '.join(ARCHITECTURES)}",
            )
        _names_in(header, list(names))

    def assemble(self, shards: ShardWriter, folder: Path) -> None:
        assert self.template is not None
        shards.write()
        try:
            mix = self.scheme.layout.kind if self.scheme.layout else ""
            write_file(mix, self.template, shards.paths, folder / FILE)
        except OSError as error:
            raise not_written(folder / FILE, error) from error
        shards.remove()


def _convert(converter: Path, source: Path, out: Path) -> None:
    """Run llama.cpp's converter on a folder."""
    partial = out.with_name("partial.gguf")
    command = [sys.executable, str(converter), str(source), "--outfile", str(partial)]
    hint = "run it by hand; `--converter` takes a `.gguf` file that it made, too"
    try:
        result = subprocess.run(
            [*command, "--outtype", "auto"], capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"`{converter}` did not run: {error}"[:300], hint=hint) from error
    if result.returncode or not partial.is_file():
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        why = lines[-1][:200] if lines else "no reason is given"
        raise MachineError(f"`{converter}` ends with {result.returncode}: {why}", hint=hint)
    partial.replace(out)


# ------------------------------------------------- the file of the converter, with other tensors


def _names_in(header: GgufHeader, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the dense names of each tensor of a template, several where they are experts.

    There is none for what depends on no weight.
    """
    if len(reading.of_text(names)) < len(names):
        raise SourceError(
            "a GGUF file holds the text of a wrapper alone, and an export all of its tensors",
            hint="name a scheme of integers and `--format compressed-tensors`, or export the text "
            "of the wrapper from a folder that holds it alone",
        )
    members: dict[str, list[str]] = {}
    for name, file_place in reading.dense_places(header, names, library()).items():
        if file_place.dense is not None:
            raise SourceError(
                f"`{name}` is stored in another form in GGUF files of `{header.architecture}`, "
                "which are read and not written",
                hint="name a scheme of integers and `--format compressed-tensors`",
            )
        members.setdefault(file_place.first, []).append(name)
    places = {}
    for place, found in members.items():
        numbers = {reading.expert_in(name): name for name in found}
        if len(found) > 1 and set(numbers) != set(range(len(found))):
            raise SourceError(
                f"`{found[0]}` and `{found[1]}` are both `{place}` in a GGUF file",
                hint="make the template of this checkpoint, with llama.cpp's converter",
            )
        places[place] = tuple(numbers[number] for number in sorted(numbers, key=lambda n: n or 0))
    if reading.ROPE_FACTORS in header.tensors:
        places[reading.ROPE_FACTORS] = ()
    is_tied = HEAD not in places and EMBEDDINGS in places
    if is_tied and (HEAD in header.tensors or header.architecture in _WITH_HEAD):
        places[HEAD] = places[EMBEDDINGS]
    placed = {name for names_of_place in places.values() for name in names_of_place}
    differing = {*(set(header.tensors) - set(places)), *(set(names) - placed)}
    differing.discard("lm_head.weight")  # tied where it is absent
    if differing:
        raise SourceError(
            f"the template and the checkpoint differ: `{min(differing)}` is in one alone",
            hint="make the template of this checkpoint, with llama.cpp's converter",
        )
    return places


def write_file(mix: str, template: Path, parts: Sequence[Path], out: Path) -> None:
    """Write the template with the tensors of parts in place of its own."""
    gguf = library()
    header, source = read_header(template), gguf.GGUFReader(template)
    stored = _stored_in(parts)
    names = _names_in(header, list(stored))
    writer = gguf.GGUFWriter(out, header.architecture)
    writer.data_alignment = source.alignment
    every = [name for members in names.values() for name in members]
    kinds = [kind for _, _, kind in map(stored.__getitem__, every) if kind in TYPES]
    most = max(kinds, key=kinds.count)
    file_type = mix if mix.endswith("_M") else most + "_S" * (most in _SMALL)
    changed = {
        "general.file_type": int(gguf.LlamaFileType[f"MOSTLY_{file_type}"]),
        "general.quantization_version": 2,
    }
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name in (*changed, "general.architecture"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for key, value in changed.items():
        writer.add_uint32(key, value)
    order = {tensor.name: tensor for tensor in source.tensors}
    for name, dense in names.items():
        shape, dtype, raw = order[name].data.shape, order[name].data.dtype, None
        if dense:
            folder, key, kind = stored[dense[0]]
            shape, dtype = folder.shape(key), np.dtype(_NUMBERS.get(kind, np.uint8))
            if kind == "BF16":  # as bytes
                shape = (*shape[:-1], 2 * shape[-1])
            if reading.expert_in(dense[0]) is not None:
                shape = (len(dense), *shape)
            raw = gguf.GGMLQuantizationType[kind] if kind not in _NUMBERS else None
        writer.add_tensor_info(name, shape, dtype, int(prod(shape)) * dtype.itemsize, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, dense in names.items():
        array = _array(header, name, dense, stored) if dense else order[name].data
        writer.write_tensor_data(array)
    writer.close()


_NUMBERS = {"F32": np.float32, "F16": np.float16}
_Stored = tuple[WeightFolder, str, str]
"""Where a tensor of an export is, under which name, and in which type."""


def _stored_in(parts: Sequence[Path]) -> dict[str, _Stored]:
    """Return the tensors of an export by dense names; vectors are in float32."""
    stored: dict[str, _Stored] = {}
    for path in parts:
        folder = WeightFolder(path.parent)
        for key, info in folder.infos.items():
            stem, _, kind = key.rpartition(".")
            if kind in TYPES:
                stored[f"{stem}.weight"] = folder, key, kind
            else:
                narrow = len(info.shape) > 1 and info.dtype in ("F16", "BF16")
                stored[key] = folder, key, info.dtype if narrow else "F32"
    return stored


def _array(
    header: GgufHeader, place: str, names: Sequence[str], stored: Mapping[str, _Stored]
) -> Any:
    """Return the written array of a tensor, as llama.cpp has it; experts are stacked."""
    heads, arrays = reading.heads_of(header, place), []
    for folder, key, kind in map(stored.__getitem__, names):
        tensor = folder.read(key)
        if kind == "F32":
            tensor = tensor.float()
        elif kind == "BF16":
            tensor = tensor.view(torch.uint8)
        array = tensor.numpy()
        arrays.append(reading.turned(array, heads, 2).copy() if heads else array)
    array = arrays[0] if reading.expert_in(names[0]) is None else np.stack(arrays)
    return array + np.float32(1) if reading.adds_one(header, place) else array
