"""A GGUF file beside the model that it was made from: its names, order of rows and vocabulary.

`gguf` knows the names; which rows llama.cpp's converter puts in another order, and what it adds to
norms, and which tensors it joins, splits or turns, is in `architectures.py`. Matrices of
experts that a release stores one by one are one tensor.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qaudit.checkpoints.configuration import read_configuration
from qaudit.errors import SourceError, UsageError
from qaudit.formats.gguf.architectures import (
    ARCHITECTURES,
    BLOCK,
    EVERYWHERE,
    XIELU,
    Dense,
    place_of,
)
from qaudit.formats.gguf.header import DAMAGED, GgufHeader
from qaudit.formats.gguf.metadata import UNKNOWN, differences, rope_factors
from qaudit.formats.reading import refused
from qaudit.formats.tokenizers import (
    VOCABULARY,
    merges_of,
    other_model,
    other_tokenizer,
    read_tokenizer,
)

_MOST_BLOCKS = 10_000
_USER_DEFINED = 4  # a type of tokens
_WORD_MARK = "\u2581"  # in place of spaces in the vocabulary of Gemma
_EXPERT = re.compile(r"(\.experts)\.(\d+)\.")
_INSIDE = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.*)")
_BESIDE = ("mtp.", "visual.")  # blocks that guess tokens ahead, and towers (Qwen)
ROPE_FACTORS = "rope_freqs.weight"
_NORM_OF_STATE = "ssm_norm.weight"
HEAD, EMBEDDINGS = "output.weight", "token_embd.weight"


def interleave(rows: Any, heads: int) -> Any:
    """Put rows of q or k in the order of llama.cpp: halves of each head take turns."""
    return _turned(rows, heads, 2)


def separate(rows: Any, heads: int) -> Any:
    """Put rows of q or k back in the order of transformers."""
    return _turned(rows, heads, len(rows) // heads // 2)


def _turned(rows: Any, heads: int, outer: int) -> Any:
    inner = len(rows) // heads // outer
    split = rows.reshape(heads, outer, inner, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def heads_of(header: GgufHeader, tensor: str) -> int | None:
    """Return the heads of q and k whose rows are interleaved."""
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", tensor)
    if match is None or not ARCHITECTURES[header.architecture].interleaved:
        return None
    every, shared = (
        header.largest("attention.head_count"),
        header.largest("attention.head_count_kv"),
    )
    heads = every if match[1] == "q" or shared is None else shared
    rows = header.tensors[tensor].shape[0]
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise refused(tensor, f"has {rows} rows, which {heads} heads do not divide in halves")
    return heads


def adds_one(header: GgufHeader, tensor: str) -> bool:
    """Return whether a tensor is a norm whose weights are stored with one added."""
    is_norm = tensor.endswith("norm.weight") and not tensor.endswith(_NORM_OF_STATE)
    return ARCHITECTURES[header.architecture].adds_one and is_norm


@dataclass(frozen=True)
class FilePlace:
    """The tensors of a file that a dense tensor is made of."""

    tensors: tuple[str, ...]
    expert: int | None = None  # of the first
    dense: Dense | None = None  # makes it of them, if it is not the first
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
        raise SourceError(f"a GGUF file of {blocks:g} blocks is damaged", hint=DAMAGED)
    table = gguf.get_tensor_name_map(kinds[header.architecture], int(blocks))
    moves = (*ARCHITECTURES[header.architecture].moves, *EVERYWHERE)
    places = {}
    for name, plain in of_text(base).items():
        if numbers := _activation(header, plain):
            places[name] = FilePlace((), numbers=numbers)
            continue
        merged = _EXPERT.sub(r"\1.", plain)
        moved = place_of(moves, merged)
        if moved is None or not set(moved[0]) <= set(header.tensors):
            parts = (merged, merged.removeprefix("transformer."))
            usual = [table.get_name(part, try_suffixes=(".weight", ".bias")) for part in parts]
            moved = next((((tensor,), None) for tensor in usual if tensor in header.tensors), None)
        if moved is not None:
            places[name] = FilePlace(moved[0], expert_in(plain), moved[1])
    return places


def _activation(header: GgufHeader, name: str) -> tuple[float, ...]:
    """Return the number of a block's activation that metadata hold (Apertus)."""
    block = BLOCK.fullmatch(name)
    match = XIELU.fullmatch(block[2]) if block else None
    values = header.metadata.get(f"xielu.{match[1]}") if match else None
    if not block or not isinstance(values, list) or int(block[1]) >= len(values):
        return ()
    value = values[int(block[1])]
    return (value,) if isinstance(value, float) and math.isfinite(value) else ()


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
            raise other_model(label, "architecture", architecture, theirs, base)
        for key, value, wanted in differences(header, config):
            raise _other_arithmetic(label, f"{architecture}.{key}", value, wanted, base)
        _must_rotate_alike(label, header, config, base, path)
    _must_have_words(label, header, base)


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
        hint="give the model that the file was made from as the target",
    )


def _must_rotate_alike(
    label: str, header: GgufHeader, config: Mapping[str, Any], base: Path, path: Path | None
) -> None:
    """Compare the factors of rotations (Llama 3.1), which a converter computes and stores."""
    info = header.tensors.get(ROPE_FACTORS)
    pairs = info.shape[-1] if info else 1
    wanted = rope_factors(config, pairs)
    if info is None:
        if wanted is not None:
            raise _other_arithmetic(label, ROPE_FACTORS, "not there", "one of `llama3`", base)
        return
    if path is None:
        return
    with path.open("rb") as file:
        file.seek(info.start)
        raw = file.read(4 * pairs)
    stored = struct.unpack(f"<{len(raw) // 4}f", raw[: len(raw) // 4 * 4])
    pairs_of = zip(stored, wanted or [1.0] * pairs, strict=False)
    if (
        info.kind
        or len(stored) < pairs
        or not all(math.isclose(a, b, rel_tol=1e-4) for a, b in pairs_of)
    ):
        raise _other_arithmetic(label, ROPE_FACTORS, "of other rotations", "those of its own", base)


def _must_have_words(label: str, header: GgufHeader, base: Path) -> None:
    """Compare the tokens of both; those that were added later may be written in another way."""
    table, tokens = read_tokenizer(base), header.metadata.get("tokenizer.ggml.tokens")
    if table is None or not isinstance(tokens, list):
        return
    extra = table.get("added_tokens")
    added = {token.get("id") for token in extra if isinstance(token, dict)} if extra else set()
    for text, number in table["model"]["vocab"].items():
        if number in added or not isinstance(number, int):
            continue
        if not 0 <= number < len(tokens) or (
            tokens[number] != text and not _with_spaces(header, number, text)
        ):
            raise other_tokenizer(label, VOCABULARY, base)
    merges = header.metadata.get("tokenizer.ggml.merges")
    if isinstance(merges, list) and merges != [_as_gguf(pair) for pair in merges_of(table)]:
        raise other_tokenizer(label, "merges", base)


def _with_spaces(header: GgufHeader, number: int, text: str) -> bool:
    """Return whether a token is one that llama.cpp's converter writes with spaces.

    It does so where a token is found in text as it is, before words are made.
    """
    tokens = header.metadata["tokenizer.ggml.tokens"]
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or number >= len(kinds) or kinds[number] != _USER_DEFINED:
        return False
    return bool(tokens[number] == text.replace(_WORD_MARK, " "))


def _as_gguf(pair: Sequence[str]) -> str:
    """Write a pair as the `gguf` package does, which keeps spaces of tokens apart."""
    return " ".join(part.replace(" ", chr(ord(" ") + 256)) for part in pair)
