"""A GGUF file beside the model that it was made from: its tensors as a dense checkpoint has them.

`gguf` decodes, and knows the names; which rows llama.cpp's converter puts in another order, what it
adds to norms, and which tensors it joins, splits or turns, is in `architectures.py`. Matrices of
experts that a release stores one by one are one tensor. Norms, embeddings and head are those of the
file. Its metadata and vocabulary are held against the configuration and tokenizer of the base.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from qaudit.checkpoints.configuration import read_configuration
from qaudit.errors import SourceError, UsageError
from qaudit.formats import reading
from qaudit.formats.gguf import architectures
from qaudit.formats.gguf import header as headers
from qaudit.formats.gguf.architectures import ARCHITECTURES
from qaudit.formats.gguf.header import GgufHeader, GgufTensor, library, read_header
from qaudit.formats.gguf.metadata import UNKNOWN, differences, rope_factors
from qaudit.formats.reading import Rounding, refused
from qaudit.support.keys import install
from qaudit.support.lazy import Tensor, torch
from qaudit.whole import open_regular

_MOST_BLOCKS = 10_000
_USER_DEFINED = 4  # a type of tokens
_WORD_MARK = "\u2581"  # in place of spaces in the vocabulary of Gemma
_EXPERT = re.compile(r"(\.experts)\.(\d+)\.")
_INSIDE = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.*)")
_BESIDE = ("mtp.", "visual.")  # blocks that guess tokens ahead, and towers (Qwen)
ROPE_FACTORS = "rope_freqs.weight"
"""What depends on no weight; it is compared with the configuration of the base."""


# ------------------------------------------------------- where a file has a model's tensors


def turned(rows: Any, heads: int, outer: int) -> Any:
    """Reorder rows of q or k: of 2 rows, the halves of each head take turns, as llama.cpp has them.

    Of half as many rows as a head has, they are back in the order of transformers.
    """
    split = rows.reshape(heads, outer, len(rows) // heads // outer, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def heads_of(header: GgufHeader, tensor: str) -> int | None:
    """Return the heads of q and k whose rows are interleaved."""
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", tensor)
    if match is None or not ARCHITECTURES[header.architecture].interleaved:
        return None
    every = header.largest("attention.head_count")
    shared = header.largest("attention.head_count_kv")
    heads = every if match[1] == "q" or shared is None else shared
    rows = header.tensors[tensor].shape[0]
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise refused(tensor, f"has {rows} rows, which {heads} heads do not divide in halves")
    return heads


def adds_one(header: GgufHeader, tensor: str) -> bool:
    """Return whether a tensor is a norm whose weights are stored with one added."""
    is_norm = tensor.endswith("norm.weight") and not tensor.endswith("ssm_norm.weight")
    return ARCHITECTURES[header.architecture].adds_one and is_norm


@dataclass(frozen=True)
class FilePlace:
    """The tensors of a file that a dense tensor is made of."""

    tensors: tuple[str, ...]
    expert: int | None = None  # of the first
    dense: architectures.Dense | None = None  # makes it of them, if it is not the first
    numbers: tuple[float, ...] = ()  # what it holds, where metadata have it

    @property
    def first(self) -> str:
        return self.tensors[0] if self.tensors else ""


def expert_in(name: str) -> int | None:
    """Return the number of the expert that a dense tensor is of."""
    match = _EXPERT.search(name)
    return int(match[2]) if match else None


def of_text(base: Collection[str]) -> dict[str, str]:
    """Return the tensors of a model's text, by the names of a model that is text alone.

    The text of a wrapper is inside `language_model`; its towers are no part of a file.
    """
    inside = {name: match[1] for name in base if (match := _INSIDE.fullmatch(name))}
    if not inside:
        return {name: name for name in base if not name.startswith(_BESIDE)}
    heads = {name: "lm_head.weight" for name in base if name.endswith("lm_head.weight")}
    return {name: f"model.{plain}" for name, plain in inside.items()} | heads


def dense_places(header: GgufHeader, base: Collection[str], gguf: Any) -> dict[str, FilePlace]:
    """Return where a file has each tensor that it has of a model; experts share one."""
    kinds = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    blocks = header.number("block_count") or 0
    if not 0 < blocks <= _MOST_BLOCKS:
        raise SourceError(f"a GGUF file of {blocks:g} blocks is damaged", hint=headers.DAMAGED)
    table = gguf.get_tensor_name_map(kinds[header.architecture], int(blocks))
    moves = (*ARCHITECTURES[header.architecture].moves, *architectures.EVERYWHERE)
    places = {}
    for name, plain in of_text(base).items():
        block = architectures.BLOCK.fullmatch(plain)
        match = architectures.XIELU.fullmatch(block[2]) if block else None
        if block and match:  # a number that metadata hold (Apertus)
            values = header.metadata.get(f"xielu.{match[1]}")
            numbers = values[int(block[1]) :][:1] if isinstance(values, list) else []
            if numbers and isinstance(numbers[0], float) and math.isfinite(numbers[0]):
                places[name] = FilePlace((), numbers=tuple(numbers))
                continue
        merged = _EXPERT.sub(r"\1.", plain)
        moved = architectures.place_of(moves, merged)
        if moved is None or not set(moved[0]) <= set(header.tensors):
            parts = (merged, merged.removeprefix("transformer."))
            usual = [table.get_name(part, try_suffixes=(".weight", ".bias")) for part in parts]
            moved = next((((tensor,), None) for tensor in usual if tensor in header.tensors), None)
        if moved is not None:
            places[name] = FilePlace(moved[0], expert_in(plain), moved[1])
    return places


# --------------------------------------------------------------------- the tensors of a file


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
        self.linears = {
            name: Stored(self.shape(name), headers.bits_of(kinds[place.first][0]))
            for name, place in named.items()
            if place.tensors
            and kinds[place.first][0] not in headers.PLAIN
            and place.first not in (headers.HEAD, headers.EMBEDDINGS)
        }
        """What is quantized, by dense name; not embeddings and head, which no scheme rounds."""

    @property
    def notes(self) -> tuple[str, ...]:
        bits = self.bits
        most = reading.most_bits((linear.bits, linear.shape) for linear in self.linears.values())
        note = f"judged in the class of its name, {bits} bits: most of its codes have {most}"
        return () if bits == most else (note,)

    @property
    def bits(self) -> int:
        """Return the bits that the file claims, or those of a code in most weights."""
        return headers.bits_in(self._header, self._path)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self._kinds.values())

    def nbytes_of(self, name: str) -> int:
        place = self._places[name]
        parts = self._header.tensors[place.first].shape[0] if place.expert is not None else 1
        return sum(self._kinds[tensor][1] for tensor in place.tensors) // parts

    def names(self) -> Sequence[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        if place.numbers:
            return tuple(self.read(name).shape)
        shapes = [self._header.tensors[tensor].shape for tensor in place.tensors]
        if place.dense is not None:
            empty = [torch.empty(shape, device="meta") for shape in shapes]
            return tuple(architectures.made(name, place.dense, empty, self._header).shape)
        return shapes[0] if place.expert is None else shapes[0][1:]

    def read(self, name: str) -> Tensor:
        """Return a dense tensor in float32, with rows where transformers has them."""
        place = self._places[name]
        if place.numbers:
            is_scalar = name.endswith((".beta", ".eps"))
            values = place.numbers[0] if is_scalar else place.numbers
            return torch.tensor(values, dtype=torch.float32)
        tensors = [self._decoded(name, tensor, place.expert) for tensor in place.tensors]
        if place.dense is None:
            return tensors[0]
        return architectures.made(name, place.dense, tensors, self._header).contiguous()

    def _decoded(self, name: str, stored: str, expert: int | None) -> Tensor:
        """Return a tensor of the file, or one expert of it."""
        import numpy as np

        info = self._header.tensors[stored]
        shape = info.shape if expert is None else info.shape[1:]
        kind = self._gguf.GGMLQuantizationType[self._kinds[stored][0]]
        rows = np.frombuffer(self._bytes(info, expert), np.uint8)
        with np.errstate(all="ignore"):
            values = self._gguf.quants.dequantize(rows.reshape(prod(shape[:-1]), -1), kind)
        values = values.reshape(shape)
        if not np.isfinite(values).all():
            raise refused(name, "holds NaN or infinity")
        if heads := heads_of(self._header, stored):
            values = turned(values, heads, len(values) // heads // 2)
        if adds_one(self._header, stored):
            values = values - np.float32(1)
        return torch.from_numpy(np.array(values, np.float32))

    def groups(self, name: str) -> Tensor | None:
        """Return nothing: columns are grouped in their own order, in blocks of one size."""
        return None

    def _bytes(self, info: GgufTensor, expert: int | None = None) -> bytes:
        """Return the bytes of a tensor, or of one of its experts."""
        wanted = self._kinds[info.name][1] // (1 if expert is None else info.shape[0])
        with open_regular(self._path) as file:
            file.seek(info.start + wanted * (expert or 0))
            data = file.read(wanted)
        if len(data) < wanted:
            raise SourceError(f"`{self._path}` is cut short in `{info.name}`", hint=headers.DAMAGED)
        return data

    def _named(self, base: frozenset[str]) -> dict[str, FilePlace]:
        """Return the file's tensors for each of the base's; refuse others of consequence."""
        tensors = self._header.tensors
        places, text = dense_places(self._header, base, self._gguf), of_text(base)
        blocks, ahead = (
            int(self._header.number(key) or 0) for key in ("block_count", "nextn_predict_layers")
        )
        before = blocks - ahead
        missing = sorted(
            name
            for name, plain in text.items()
            if name not in places
            and plain != "lm_head.weight"
            and not ((block := architectures.BLOCK.fullmatch(plain)) and int(block[1]) >= before)
        )
        if missing:
            raise SourceError(
                f"`{self._path}` has nothing for `{missing[0]}` of its base"
                + (f", and for {len(missing) - 1} more" if len(missing) > 1 else ""),
                hint=reading.OF_THE_BASE,
            )
        for place in places.values():
            shape = tensors[place.first].shape if place.expert is not None else ()
            if place.expert is not None and (len(shape) != 3 or place.expert >= shape[0]):
                why = f"has the shape {list(shape)}, without an expert {place.expert}"
                raise refused(place.first[:60], why)
        guesses = tuple(f"blk.{k}." for k in range(max(before, 0), blocks))
        placed = {tensor for place in places.values() for tensor in place.tensors}
        unplaced = {name for name in self._kinds if not name.startswith(guesses)} - placed
        unplaced.discard(ROPE_FACTORS)
        if headers.HEAD in unplaced and "lm_head.weight" not in text.values():
            unplaced.remove(headers.HEAD)
            # OLMo 2 needs a copy of the embeddings.
            head, front = tensors[headers.HEAD], tensors[headers.EMBEDDINGS]
            same = (head.kind, head.shape) == (front.kind, front.shape)
            if not same or self._bytes(head) != self._bytes(front):
                raise SourceError(
                    f"`{self._path}` stores a head apart from its embeddings, which are one matrix "
                    "in its base",
                    hint="make the file with `--tensor-type output.weight=...` of the embeddings",
                )
        if unplaced:
            raise SourceError(
                f"`{self._path}` holds `{min(unplaced)}`, for which its base has no place",
                hint=reading.OF_THE_BASE,
            )
        return places


def _checked(header: GgufHeader, path: Path, gguf: Any) -> dict[str, tuple[str, int]]:
    """Return the type and the bytes of each tensor; refuse what is not decoded or does not fit."""
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise SourceError(
            f"`{path}` is one of {str(header.metadata['split.count'])[:20]} parts of a model",
            hint="join them with `llama-gguf-split --merge`, and name the whole file",
        )
    if (architecture := header.architecture) not in ARCHITECTURES:
        reasons = (why for why, names in architectures.UNPROVED.items() if architecture in names)
        why = next(reasons, "transformers has no decoder that is made so")
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
        columns, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        if info.shape[-1] % columns:
            raise refused(info.name[:60], f"has {info.shape[-1]} columns, which {kind} cannot hold")
        if info.start < end:
            raise refused(info.name[:60], "overlaps the tensor before it")
        kinds[info.name] = kind, int(prod(info.shape) // columns * nbytes)
        end = info.start + kinds[info.name][1]
        if end > size:
            raise SourceError(f"`{path}` is cut short in `{info.name[:60]}`", hint=headers.DAMAGED)
    return kinds


def _is_decoded(number: Any, gguf: Any) -> bool:
    import numpy as np

    block = np.zeros((1, gguf.GGML_QUANT_SIZES[number][1]), np.uint8)
    try:
        gguf.quants.dequantize(block, number)
    except NotImplementedError:
        return False
    return True


# ----------------------------------------------------------------------- the model of a file


def must_match(label: str, header: GgufHeader, base: Path, path: Path | None = None) -> None:
    """Refuse a file by which llama.cpp computes another model than the base, or other tokens.

    Factors of rotations are tensors, which are compared where the file is on this machine.
    """
    config = read_configuration(base)
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    architecture, theirs = header.architecture, config.get("model_type")
    if architecture in ARCHITECTURES:
        if theirs not in ARCHITECTURES[architecture].types:
            raise reading.other_model(label, "architecture", architecture, theirs, base)
        for key, value, wanted in differences(header, config):
            raise _other_arithmetic(label, f"{architecture}.{key}", value, wanted, base)
        _must_rotate_alike(label, header, config, base, path)
    table, tokens = reading.read_tokenizer(base), header.metadata.get("tokenizer.ggml.tokens")
    if table is None or not isinstance(tokens, list):
        return
    # Tokens that were added later may be written in another way.
    added = {t.get("id") for t in table.get("added_tokens") or () if isinstance(t, dict)}
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    kinds = kinds if isinstance(kinds, list) else []
    for text, number in table["model"]["vocab"].items():
        if number in added or not isinstance(number, int):
            continue
        # Tokens that are found before words are made are written with spaces.
        is_defined = 0 <= number < len(kinds) and kinds[number] == _USER_DEFINED
        spaced = text.replace(_WORD_MARK, " ") if is_defined else text
        if not 0 <= number < len(tokens) or tokens[number] not in (text, spaced):
            raise reading.other_tokenizer(label, reading.VOCABULARY, base)
    merges = header.metadata.get("tokenizer.ggml.merges")
    mark = chr(ord(" ") + 256)  # the `gguf` package keeps spaces of tokens apart
    pairs = [" ".join(p.replace(" ", mark) for p in pair) for pair in reading.merges_of(table)]
    if isinstance(merges, list) and merges != pairs:
        raise reading.other_tokenizer(label, "merges", base)


def _other_arithmetic(
    label: str, key: str, value: object, wanted: object, base: Path
) -> UsageError:
    if wanted == UNKNOWN:
        return UsageError(
            f"`{label}` has `{key[:60]}`, by which llama.cpp may compute, and which is not read",
            hint=f"`gguf-new-metadata --remove-metadata {key[:60]}` removes it",
        )
    return UsageError(
        f"llama.cpp computes another model from `{label}` than `{base}` is: `{key}` is "
        f"{str(value)[:40]} where the base needs {str(wanted)[:40]}",
        hint=reading.OF_THE_BASE,
    )


def _must_rotate_alike(
    label: str, header: GgufHeader, config: Mapping[str, Any], base: Path, path: Path | None
) -> None:
    """Compare the factors of rotations (Llama 3.1), which a converter computes and stores."""
    info = header.tensors.get(ROPE_FACTORS)
    pairs = info.shape[-1] if info else 1
    wanted = rope_factors(config, pairs)
    if info is None and wanted is not None:
        raise _other_arithmetic(label, ROPE_FACTORS, "not there", "one of `llama3`", base)
    if info is None or path is None:
        return
    with path.open("rb") as file:
        file.seek(info.start)
        raw = file.read(4 * pairs)
    stored = struct.unpack(f"<{len(raw) // 4}f", raw[: len(raw) // 4 * 4])
    both = zip(stored, wanted or [1.0] * pairs, strict=False)
    alike = all(math.isclose(a, b, rel_tol=1e-4) for a, b in both)
    if info.kind or len(stored) < pairs or not alike:
        raise _other_arithmetic(label, ROPE_FACTORS, "of other rotations", "those of its own", base)
