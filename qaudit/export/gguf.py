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
from typing import TYPE_CHECKING, Any, ClassVar

from qaudit.checkpoints.gguf import GgufHeader, is_gguf, read_header
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.gguf.blocks import TYPES, GgufBlocks, assembled, pair
from qaudit.core.stored import IntegerCodes, StoredWeight
from qaudit.errors import MachineError, SchemeError, SourceError, UsageError, not_written
from qaudit.formats import gguf as reader
from qaudit.formats import gguf_base
from qaudit.formats.packing import Document, Format, Runtime, half_scales, integer_codes, schemes_of

if TYPE_CHECKING:
    from torch import Tensor

FILE = "model.gguf"
_TEMPLATE = "template.gguf"
_BLOCK = 32
_HEAD, _EMBEDDINGS = "output.weight", "token_embd.weight"
_WITH_HEAD = ("olmo2",)
"""Architectures whose head llama.cpp wants in the file even if it is the embeddings."""
_EXACT = {4: "Q4_0", 8: "Q8_0"}  # bits of symmetric codes
_SECONDS = 3600
_FILE_TYPES = {
    "Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18,
}  # fmt: skip
_MIXES = {"Q3_K_M": 12, "Q4_K_M": 15}
"""What llama.cpp prints for a file (`general.file_type`), by mix or else by most weights."""


class GgufFiles(Format):
    """A file that llama.cpp, ollama and LM Studio load."""

    name: ClassVar[str] = "gguf"
    has_settings: ClassVar[bool] = False

    template: Path | None = None
    converter: Path | None = None

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        return (
            Runtime("llama.cpp", "b11549", "rounds activations to 8 bits where it multiplies"),
            Runtime("xllamacpp", "2026.10", "the same library, in a wheel"),
        )

    @property
    def _kind(self) -> str:
        return self.scheme.layout.kind if self.scheme.layout else ""

    # --------------------------------------------------------------------------- a linear

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        if isinstance(stored, GgufBlocks):
            return {f"{linear}.{stored.kind}": stored.packed_RB.cpu()}
        codes = integer_codes(linear, stored, self.scheme, self.name)
        kind = _EXACT.get(codes.bits)
        if kind is None or codes.zeros_RG is not None or codes.group % _BLOCK:
            raise SchemeError(
                f"no type of GGUF holds the codes of `{self.scheme.short}`: Q4_0 and Q8_0 have 4 "
                f"and 8 bits without zero points, in blocks of {_BLOCK}",
                hint=f"export {schemes_of('gguf')}, or a symmetric scheme of 4 or 8 bits and "
                "group=32",
            )
        return {f"{linear}.{kind}": _blocks(kind, linear, codes)}

    def nbits(self, tensors: Mapping[str, Tensor], measured: int) -> int:
        return 8 * sum(one.numel() for one in tensors.values())

    def dense(self, files: WeightFolder, linear: str, config: Document) -> Tensor:
        (name,) = (n for n in files.names() if n.rpartition(".")[0] == linear)
        return GgufBlocks(files.read(name), name.rpartition(".")[2]).decode()

    def as_compared(self, tensor: Tensor) -> Tensor:
        return tensor.float()

    def config(self, unquantized: tuple[str, ...], *, symmetric: bool) -> Document:
        return {}

    # ------------------------------------------------------------------------- the file

    def use(self, converter: Path | None) -> None:
        """Take what metadata come from: the converter, or a file that it made."""
        if converter is None:
            raise UsageError(
                "a GGUF file needs metadata and a tokenizer, which llama.cpp's converter writes",
                hint="add `--converter llama.cpp/convert_hf_to_gguf.py`, or `--converter` with a "
                "`.gguf` file that it made of this model",
            )
        if not converter.is_file():
            raise UsageError(
                f"there is no file `{converter}`",
                hint="give the path of `convert_hf_to_gguf.py`, or of a `.gguf` file that it made",
            )
        reader.library()
        self.template, self.converter = None, converter
        if is_gguf(converter):
            self.template = converter

    def start(self, source: Path, work: Path, names: Iterable[str]) -> None:
        """Make the template if it has to be made, and refuse one of another model."""
        if self.template is None:
            assert self.converter is not None
            self.template = work / _TEMPLATE
            if not self.template.is_file():
                _convert(self.converter, source, self.template)
        header = read_header(self.template)
        gguf_base.must_match(str(self.template), header, source, self.template)
        if header.architecture not in gguf_base.ARCHITECTURES:
            raise SourceError(
                f"the order of rows in GGUF files of `{header.architecture}` is not known here",
                hint=f"these are written: {', '.join(gguf_base.ARCHITECTURES)}",
            )
        _names(header, list(names))

    def assemble(self, parts: Sequence[Path], folder: Path) -> None:
        assert self.template is not None
        try:
            _write(self._kind, self.template, parts, folder / FILE)
        except OSError as error:
            raise not_written(folder / FILE, error) from error


def _blocks(kind: str, linear: str, codes: IntegerCodes) -> Tensor:
    """Return symmetric codes as blocks of 32, each under the scale of its group."""
    import torch

    rows, columns = codes.codes_RC.shape
    half_RG = half_scales(linear, codes)
    scale_N = half_RG.repeat_interleave(columns // _BLOCK // half_RG.shape[1], 1).reshape(-1, 1)
    codes_NK = codes.codes_RC.cpu().reshape(-1, _BLOCK)
    parts = {"d": scale_N.contiguous().view(torch.uint8)}
    if kind == "Q4_0":
        parts["low"] = pair(codes_NK, _BLOCK // 2)
    else:
        parts["codes"] = (codes_NK.to(torch.int16) - 128).to(torch.int8).view(torch.uint8)
    return assembled(kind, parts).reshape(rows, -1)


def _convert(converter: Path, source: Path, out: Path) -> None:
    """Run llama.cpp's converter on a folder."""
    partial = out.with_name("partial.gguf")
    command = [sys.executable, str(converter), str(source), "--outfile", str(partial)]
    try:
        done = subprocess.run(
            [*command, "--outtype", "auto"], capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(
            f"`{converter}` did not run: {error}"[:300],
            hint="run it by hand; `--converter` takes a `.gguf` file that it made, too",
        ) from error
    if done.returncode or not partial.is_file():
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason is given"]
        raise MachineError(
            f"`{converter}` ends with {done.returncode}: {lines[-1][:200]}",
            hint="run it by hand; `--converter` takes a `.gguf` file that it made, too",
        )
    partial.replace(out)


def _names(header: GgufHeader, names: Sequence[str]) -> dict[str, str]:
    """Return the dense name of each tensor of a template; "" for what depends on no weight."""
    own = {
        one: name for name, one in gguf_base.dense_names(header, names, reader.library()).items()
    }
    for name in header.tensors:
        if name in reader.OF_NO_CONSEQUENCE:
            own[name] = ""
    is_tied = _HEAD not in own and _EMBEDDINGS in own
    if is_tied and (_HEAD in header.tensors or header.architecture in _WITH_HEAD):
        own[_HEAD] = own[_EMBEDDINGS]
    left = sorted({*(set(header.tensors) - set(own)), *(set(names) - set(own.values()))})
    left = [name for name in left if name != "lm_head.weight"]  # tied where it is not in the file
    if left:
        raise SourceError(
            f"the template and the checkpoint differ: `{left[0]}` is in one alone",
            hint="make the template of this checkpoint, with llama.cpp's converter",
        )
    return own


def _write(mix: str, template: Path, parts: Sequence[Path], out: Path) -> None:
    """Write the template with the tensors of parts in place of its own."""
    gguf = reader.library()
    header, source = read_header(template), gguf.GGUFReader(template)
    places = _Tensors(parts)
    names = _names(header, places.names())
    writer = gguf.GGUFWriter(out, header.architecture)
    writer.data_alignment = source.alignment
    kinds = [kind for kind in map(places.kind, names.values()) if kind in TYPES]
    most = max(kinds, key=kinds.count)
    changed = {"general.file_type": _MIXES.get(mix, _FILE_TYPES[most])}
    _copy_metadata(writer, source, {**changed, "general.quantization_version": 2}, gguf)
    order = {one.name: one for one in source.tensors}
    for name, dense in names.items():
        if dense:
            shape, dtype, kind = places.described(dense)
            raw = gguf.GGMLQuantizationType[kind] if kind in (*TYPES, "BF16") else None
        else:
            shape, dtype, raw = order[name].data.shape, order[name].data.dtype, None
        writer.add_tensor_info(name, shape, dtype, int(prod(shape)) * dtype.itemsize, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, dense in names.items():
        heads = gguf_base.heads_of(header, name) if dense else None
        writer.write_tensor_data(places.array(dense, heads) if dense else order[name].data)
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
        if not name:
            return ""
        folder, key = self._files[name]
        info = folder.infos[key]
        own = key.rpartition(".")[2]
        if own in TYPES:
            return own
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

    def array(self, name: str, heads: int | None) -> Any:
        """Return what is written of a tensor, rows in the order of llama.cpp."""
        import torch

        folder, key = self._files[name]
        tensor, kind = folder.read(key), self.kind(name)
        if kind == "F32":
            tensor = tensor.float()
        elif kind == "BF16":
            tensor = tensor.view(torch.uint8)
        array = tensor.numpy()
        return gguf_base.interleave(array, heads).copy() if heads else array
