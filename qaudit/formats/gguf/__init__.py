"""GGUF files, as llama.cpp and what is built on it have them.

Codes are packed here: blocks of the `gguf-` schemes as they are, and 4- and 8-bit symmetric codes
in groups of 32 columns, or of a multiple, as Q4_0 and Q8_0, which are the same grids. Metadata and
the tokenizer come from a file that llama.cpp's own converter made of the same model: one that is
given, or one that the converter is run for. Every tensor of it is replaced.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from qaudit.checkpoints.safetensors import ShardWriter, WeightFolder
from qaudit.checkpoints.stamps import is_gguf
from qaudit.core.gguf.blocks import GgufBlocks, assembled, pair
from qaudit.core.linears import Codes, IntegerCodes, StoredWeight
from qaudit.errors import MachineError, SchemeError, SourceError, UsageError, not_written
from qaudit.formats.gguf.architectures import ARCHITECTURES
from qaudit.formats.gguf.base import must_match
from qaudit.formats.gguf.header import header_by, read_header
from qaudit.formats.gguf.reading import GgufFile, bits_in, library
from qaudit.formats.gguf.writing import names_in, write_file
from qaudit.formats.packing import (
    Document,
    FileFormat,
    Identity,
    Runtime,
    half_scales,
    integer_codes,
    schemes_of,
)
from qaudit.support.lazy import Tensor, torch

FILE = "model.gguf"
_TEMPLATE = "template.gguf"
_BLOCK = 32
_EXACT = {4: "Q4_0", 8: "Q8_0"}  # bits of symmetric codes
_SECONDS = 3600


class GgufFiles(FileFormat):
    """A file that llama.cpp, ollama and LM Studio load."""

    name: ClassVar[str] = "gguf"
    library: ClassVar[str] = "gguf"
    mixes_bits: ClassVar[bool] = True
    has_settings: ClassVar[bool] = False
    leaves_out: ClassVar[tuple[str, ...]] = ("lm_head.weight",)  # where it is the embeddings
    holds: ClassVar[tuple[Codes, ...]] = ("gguf",)
    has_embeddings: ClassVar[bool] = True
    loaded_by: ClassVar[Mapping[str, tuple[str, ...]]] = {"llama.cpp": ()}
    ending: ClassVar[str] = ".gguf"

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

    # ------------------------------------------------------------------------------ read

    @classmethod
    def identify(cls, path: Path) -> Identity:
        return cls.name, GgufFile(path).bits, 16

    @classmethod
    def identify_remote(
        cls, label: str, path: Path, nbytes: int, first: Callable[[int], bytes], base: Path
    ) -> Identity:
        header = read_header(path) if path.is_file() else header_by(path, nbytes, first)
        if (base / "config.json").is_file():
            must_match(label, header, base)
        return cls.name, bits_in(header, path), 16

    @classmethod
    def must_match(cls, label: str, path: Path, base: Path) -> None:
        must_match(label, read_header(path), base, path)

    @classmethod
    def open_file(cls, path: Path, base: Collection[str]) -> GgufFile:
        return GgufFile(path, base=base)

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

    def snippet(self, place: str, model: str, config: Document) -> str:
        return f'$ llama-cli -m {place}/{FILE} -p "The quick brown fox"'

    def dense(self, files: WeightFolder, linear: str, config: Document) -> Tensor:
        (name,) = (n for n in files.names() if n.rpartition(".")[0] == linear)
        return GgufBlocks(files.read(name), name.rpartition(".")[2]).decode()

    def as_compared(self, tensor: Tensor) -> Tensor:
        return tensor.float()

    def config(
        self, unquantized: tuple[str, ...], *, symmetric: bool, dtype: str = "float32"
    ) -> Document:
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
        library()
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
        must_match(str(self.template), header, source, self.template)
        if header.architecture not in ARCHITECTURES:
            raise SourceError(
                f"the order of rows in GGUF files of `{header.architecture}` is not known here",
                hint=f"these are written: {', '.join(ARCHITECTURES)}",
            )
        names_in(header, list(names))

    def assemble(self, shards: ShardWriter, folder: Path) -> None:
        assert self.template is not None
        shards.write()
        try:
            write_file(self._kind, self.template, shards.paths, folder / FILE)
        except OSError as error:
            raise not_written(folder / FILE, error) from error
        shards.remove()

    def weights(self, folder: Path, linears: Collection[str], rest: Collection[str]) -> GgufFile:
        return GgufFile(folder / FILE, base=[*(f"{one}.weight" for one in linears), *rest])


def _blocks(kind: str, linear: str, codes: IntegerCodes) -> Tensor:
    """Return symmetric codes as blocks of 32, each under the scale of its group."""
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
