"""A GGUF file beside the model that it was made from: its names, order of rows and vocabulary.

`gguf` knows the names; which rows llama.cpp's converter puts in another order is known here, for
the architectures that are read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.gguf import DAMAGED, GgufHeader
from qaudit.checkpoints.quantized.format import refused
from qaudit.errors import SourceError, UsageError

ARCHITECTURES = {
    "llama": ("llama", "mistral"),
    "olmo": ("olmo",),
    "olmo2": ("olmo2", "olmo3"),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
    "smollm3": ("smollm3",),
}
"""Of llama.cpp, with the `model_type` of the models they are made from."""

INTERLEAVED = ("llama", "olmo", "smollm3")
"""Those whose converter interleaves the halves of each head's rows in q and k."""

_MOST_BLOCKS = 10_000
_SAME = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}


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


def heads_of(header: GgufHeader, own: str) -> int | None:
    """Return the heads of q and k whose rows are interleaved."""
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", own)
    if match is None or header.architecture not in INTERLEAVED:
        return None
    every = header.number("attention.head_count")
    shared = header.number("attention.head_count_kv")
    heads = every if match[1] == "q" or shared is None else shared
    rows = header.tensors[own].shape[0]
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise refused(own, f"has {rows} rows, which {heads} heads do not divide in halves")
    return heads


def dense_names(header: GgufHeader, base: Collection[str], gguf: Any) -> dict[str, str]:
    """Return the name in a file of each tensor that it has of a model."""
    kinds = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    blocks = header.number("block_count") or 0
    if not 0 < blocks <= _MOST_BLOCKS:
        raise SourceError(f"a GGUF file of {blocks:g} blocks is damaged", hint=DAMAGED)
    table = gguf.get_tensor_name_map(kinds[header.architecture], int(blocks))
    own = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in base}
    return {name: one for name, one in own.items() if one in header.tensors}


def must_match(label: str, header: GgufHeader, base: Path) -> None:
    """Refuse a file of another architecture or another vocabulary than the base has."""
    config = read_configuration(base)
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    own, theirs = header.architecture, config.get("model_type")
    if own in ARCHITECTURES and theirs not in ARCHITECTURES[own]:
        raise other_model(label, "architecture", own, theirs, base)
    for key, name in _SAME.items():
        number, wanted = header.number(key), config.get(name)
        if number is not None and wanted is not None and number != wanted:
            raise other_model(label, name, number, wanted, base)
    rope = config.get("rope_parameters")
    theta = config.get("rope_theta", rope.get("rope_theta") if isinstance(rope, dict) else None)
    own_theta = header.number("rope.freq_base")
    known = own_theta is not None and isinstance(theta, int | float)
    if known and not math.isclose(own_theta or 0, theta or 0, rel_tol=1e-6):  # it is in float32
        raise other_model(label, "rope_theta", own_theta, theta, base)
    _must_have_words(label, header, base)


def other_model(label: str, key: str, own: object, theirs: object, base: Path) -> UsageError:
    """Make the error for a file that differs from its base in a value of the configuration."""
    return UsageError(
        f"`{label}` is no file of this model: its `{key}` is {str(own)[:40]}, and that of `{base}` "
        f"is {str(theirs)[:40]}",
        hint="give the model that the file was made from as the target",
    )


def other_vocabulary(label: str, base: Path) -> UsageError:
    """Make the error for a file whose tokens are not those of its base."""
    return UsageError(
        f"`{label}` has another vocabulary than `{base}`: token ids mean other text",
        hint="give the model that the file was made from as the target",
    )


def _must_have_words(label: str, header: GgufHeader, base: Path) -> None:
    """Compare the tokens of both; those that were added later may be written in another way."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    try:
        table = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = table["model"]["vocab"]
        added = {one["id"] for one in table.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    if not isinstance(tokens, list) or not isinstance(vocabulary, dict):
        return
    for text, number in vocabulary.items():
        if number in added or not isinstance(number, int):
            continue
        if not 0 <= number < len(tokens) or tokens[number] != text:
            raise other_vocabulary(label, base)
