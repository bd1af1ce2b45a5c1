"""The tensors of a GGUF file as a dense checkpoint has them, decoded one at a time.

`gguf` decodes; names and the order of rows are those of the base
(`base.py`). Norms, embeddings and head are those of the file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any

from qaudit.errors import MachineError, SourceError
from qaudit.formats.activations import Rounding
from qaudit.formats.gguf.architectures import ARCHITECTURES, BLOCK, UNPROVED, made
from qaudit.formats.gguf.base import (
    EMBEDDINGS,
    HEAD,
    ROPE_FACTORS,
    FilePlace,
    adds_one,
    dense_places,
    heads_of,
    of_text,
    separate,
)
from qaudit.formats.gguf.header import DAMAGED, GgufHeader, GgufTensor, read_header
from qaudit.formats.reading import most_bits, refused
from qaudit.support.extras import install
from qaudit.support.lazy import Tensor, torch
from qaudit.whole import open_regular

_GUESSED = 1024  # a flag in `general.file_type`
_PLAIN = ("F32", "F16", "BF16")
OF_NO_CONSEQUENCE = (ROPE_FACTORS,)
"""What depends on no weight; it is compared with the configuration of the base."""


def library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MachineError(
            "GGUF files are read by the `gguf` package", hint=install("gguf")
        ) from error
    return gguf


@dataclass(frozen=True)
class Stored:
    """A quantized tensor of a file."""

    shape: tuple[int, ...]
    bits: int  # of a code
    rounding: Rounding | None = None  # of activations, which the file says nothing about


class GgufFile:
    """The weights of one file, as dense tensors under the names of its base."""

    def __init__(self, path: Path, *, base: Collection[str] = ()) -> None:
        """Check the header; `base` names the tensors of the model that was quantized."""
        self._path = path
        self._header = read_header(path)
        self._gguf = library()
        self._kinds = kinds = _checked(self._header, path, self._gguf)
        named = self._named(frozenset(base)) if base else {n: FilePlace((n,)) for n in kinds}
        self._places: Mapping[str, FilePlace] = named
        self._layouts = {
            name: Stored(self.shape(name), bits_of(kinds[place.first]))
            for name, place in named.items()
            if kinds.get(place.first, "F32") not in _PLAIN
        }

    @property
    def notes(self) -> tuple[str, ...]:
        codes = _most([(linear.bits, linear.shape) for linear in self.linears.values()])
        if codes == self.bits:
            return ()
        return (
            f"judged in the class of its name, {self.bits} bits: most of its codes have {codes}",
        )

    @property
    def linears(self) -> Mapping[str, Stored]:
        """What is quantized, by dense name; not embeddings and head, which no scheme rounds."""
        outside = (HEAD, EMBEDDINGS)
        return {n: k for n, k in self._layouts.items() if self._places[n].first not in outside}

    @property
    def bits(self) -> int:
        """Return the bits that the file claims, or those of a code in most weights."""
        most = _most([(linear.bits, linear.shape) for linear in self.linears.values()])
        return bits_claimed(self._header, self._path) or most

    @property
    def nbytes(self) -> int:
        return sum(self._nbytes(info) for info in self._header.tensors.values())

    def nbytes_of(self, name: str) -> int:
        place = self._places[name]
        infos = [self._header.tensors[tensor] for tensor in place.tensors]
        parts = infos[0].shape[0] if place.expert is not None else 1
        return sum(self._nbytes(info) for info in infos) // parts

    def names(self) -> Sequence[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        if place.numbers:
            return self._numbers(name, place.numbers).shape
        shapes = [self._header.tensors[tensor].shape for tensor in place.tensors]
        if place.dense is not None:
            empty = [torch.empty(shape, device="meta") for shape in shapes]
            return tuple(made(name, place.dense, empty, self._header).shape)
        return shapes[0] if place.expert is None else shapes[0][1:]

    def read(self, name: str) -> Tensor:
        """Return a dense tensor in float32, with rows where transformers has them."""
        place = self._places[name]
        if place.numbers:
            return self._numbers(name, place.numbers)
        tensors = [self._decoded(name, tensor, place.expert) for tensor in place.tensors]
        if place.dense is None:
            return tensors[0]
        return made(name, place.dense, tensors, self._header).contiguous()

    def _numbers(self, name: str, numbers: tuple[float, ...]) -> Tensor:
        is_scalar = name.endswith((".beta", ".eps"))
        return torch.tensor(numbers[0] if is_scalar else numbers, dtype=torch.float32)

    def _decoded(self, name: str, stored: str, expert: int | None) -> Tensor:
        """Return a tensor of the file, or one expert of it."""
        import numpy as np

        info = self._header.tensors[stored]
        shape = info.shape if expert is None else info.shape[1:]
        kind = self._gguf.GGMLQuantizationType[self._kinds[stored]]
        rows = np.frombuffer(self._bytes(info, expert), np.uint8)
        with np.errstate(all="ignore"):
            values = self._gguf.quants.dequantize(rows.reshape(prod(shape[:-1]), -1), kind)
        values = values.reshape(shape)
        if not np.isfinite(values).all():
            raise refused(name, "holds NaN or infinity")
        if heads := heads_of(self._header, stored):
            values = separate(values, heads)
        if adds_one(self._header, stored):
            values = values - np.float32(1)
        return torch.from_numpy(np.array(values, np.float32))

    def groups(self, name: str) -> Tensor | None:
        """Return nothing: columns are grouped in their own order, in blocks of one size."""
        return None

    def _nbytes(self, info: GgufTensor) -> int:
        return nbytes_of(info, self._kinds[info.name], self._gguf)

    def _bytes(self, info: GgufTensor, expert: int | None = None) -> bytes:
        """Return the bytes of a tensor, or of one of its experts."""
        wanted = self._nbytes(info) // (1 if expert is None else info.shape[0])
        with open_regular(self._path) as file:
            file.seek(info.start + wanted * (expert or 0))
            data = file.read(wanted)
        if len(data) < wanted:
            raise SourceError(f"`{self._path}` is cut short in `{info.name}`", hint=DAMAGED)
        return data

    def _named(self, base: frozenset[str]) -> dict[str, FilePlace]:
        """Return the file's tensors for each of the base's; refuse others of consequence."""
        places = dense_places(self._header, base, self._gguf)
        text = of_text(base)
        is_tied = "lm_head.weight" not in text.values()
        missing = sorted(
            name
            for name, plain in text.items()
            if name not in places and plain != "lm_head.weight" and not self._is_ahead(plain)
        )
        if missing:
            raise SourceError(
                f"`{self._path}` has nothing for `{missing[0]}` of its base"
                + (f", and for {len(missing) - 1} more" if len(missing) > 1 else ""),
                hint="give the model that the file was made from as the target",
            )
        for place in places.values():
            if place.expert is not None:
                _must_hold_expert(self._header.tensors[place.first], place.expert)
        placed = {tensor for place in places.values() for tensor in place.tensors}
        unplaced = set(self._kinds) - placed - set(OF_NO_CONSEQUENCE) - self._of_blocks_ahead()
        if HEAD in unplaced and is_tied:
            unplaced.remove(HEAD)
            if not self._is_tied():
                raise SourceError(
                    f"`{self._path}` stores a head apart from its embeddings, which are one matrix "
                    "in its base",
                    hint="make the file with `--tensor-type output.weight=...` of the embeddings",
                )
        if unplaced:
            raise SourceError(
                f"`{self._path}` holds `{min(unplaced)}`, for which its base has no place",
                hint="give the model that the file was made from as the target",
            )
        return places

    @property
    def _blocks(self) -> tuple[int, int]:
        """Return the number of blocks, and of all with those that guess tokens ahead."""
        blocks = int(self._header.number("block_count") or 0)
        return blocks - int(self._header.number("nextn_predict_layers") or 0), blocks

    def _is_ahead(self, plain: str) -> bool:
        """Return whether a tensor of the base is of a block that guesses tokens ahead."""
        block = BLOCK.fullmatch(plain)
        return block is not None and int(block[1]) >= self._blocks[0]

    def _of_blocks_ahead(self) -> set[str]:
        starts = tuple(f"blk.{k}." for k in range(max(self._blocks[0], 0), self._blocks[1]))
        return {name for name in self._kinds if name.startswith(starts)} if starts else set()

    def _is_tied(self) -> bool:
        """Return whether the head is a copy of the embeddings, as OLMo 2 needs it."""
        head, front = (self._header.tensors[name] for name in (HEAD, EMBEDDINGS))
        same = (head.kind, head.shape) == (front.kind, front.shape)
        return same and self._bytes(head) == self._bytes(front)


def _must_hold_expert(info: GgufTensor, expert: int) -> None:
    if len(info.shape) != 3 or expert >= info.shape[0]:
        raise refused(
            info.name[:60], f"has the shape {list(info.shape)}, without an expert {expert}"
        )


_CLAIM = re.compile(r"(?:^|[-_.])(I?Q\d|TQ\d|MXFP4|NVFP4)(?=[-_.]|$)", re.IGNORECASE)


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
    most = _most(
        [
            (bits_of(kinds[info.kind]), info.shape)
            for name, info in header.tensors.items()
            if name not in (HEAD, EMBEDDINGS) and kinds.get(info.kind, "F32") not in _PLAIN
        ]
    )
    return bits_claimed(header, path) or most


def _most(codes: Sequence[tuple[int, tuple[int, ...]]]) -> int:
    if not codes:
        raise SourceError(
            "no linear of the GGUF file is quantized",
            hint="name its full-precision model as a target, not with `--shipped`",
        )
    return most_bits(codes)


def bits_of(kind: str) -> int:
    """Return the bits of a code, which names of types hold."""
    digits = re.search(r"\d+", kind.removeprefix("MX").removeprefix("NV"))
    return int(digits[0]) if digits else 8


def nbytes_of(info: GgufTensor, kind: str, gguf: Any) -> int:
    columns, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(prod(info.shape) // columns * nbytes)


def _checked(header: GgufHeader, path: Path, gguf: Any) -> dict[str, str]:
    """Return the type of each tensor; refuse what cannot be decoded or does not fit the file."""
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise SourceError(
            f"`{path}` is one of {str(header.metadata['split.count'])[:20]} parts of a model",
            hint="join them with `llama-gguf-split --merge`, and name the whole file",
        )
    if (architecture := header.architecture) not in ARCHITECTURES:
        why = UNPROVED.get(architecture, "transformers has no decoder that is made so")
        raise SourceError(
            f"`{path}` is a model of the architecture `{architecture}`, which is not read: {why}",
            hint=f"these are read: {', '.join(ARCHITECTURES)}",
        )
    decoded = {int(k): k.name for k in gguf.GGMLQuantizationType if _is_decoded(k, gguf)}
    kinds, size, end = {}, path.stat().st_size, 0
    for info in sorted(header.tensors.values(), key=lambda info: info.start):
        kind = decoded.get(info.kind)
        if kind is None:
            raise SourceError(
                f"`{info.name[:60]}` of `{path}` has type {info.kind}, which is not decoded",
                hint=f"a newer `gguf` package may decode it: {install('gguf')} --upgrade",
            )
        if info.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
            raise refused(info.name[:60], f"has {info.shape[-1]} columns, which {kind} cannot hold")
        if info.start < end:
            raise refused(info.name[:60], "overlaps the tensor before it")
        end = info.start + nbytes_of(info, kind, gguf)
        if end > size:
            raise SourceError(f"`{path}` is cut short in `{info.name[:60]}`", hint=DAMAGED)
        kinds[info.name] = kind
    return kinds


def _is_decoded(number: Any, gguf: Any) -> bool:
    import numpy as np

    block = np.zeros((1, gguf.GGML_QUANT_SIZES[number][1]), np.uint8)
    try:
        gguf.quants.dequantize(block, number)
    except NotImplementedError:
        return False
    return True
