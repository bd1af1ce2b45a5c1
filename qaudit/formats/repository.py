"""What a quantized repository says of itself, before any tensor is read. No torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.places import is_gguf
from qaudit.formats.activations import act_bits
from qaudit.formats.gguf import base as gguf_base
from qaudit.formats.gguf import reading as gguf
from qaudit.formats.gguf.header import read_header
from qaudit.formats.gguf.reading import GgufFile
from qaudit.formats.reading import contradiction
from qaudit.formats.tokenizers import differing_part, other_tokenizer, read_tokenizer
from qaudit.formats.weights import QuantizedFolder, known_quantization

_COMPARED = (
    "model_type", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads",
    "n_head", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "hidden_act",
    "rope_theta",
)  # fmt: skip
QuantizedWeights = QuantizedFolder | GgufFile


def open_quantized(place: Path, *, base: Collection[str] = ()) -> QuantizedWeights:
    return GgufFile(place, base=base) if is_gguf(place) else QuantizedFolder(place, base=base)


def format_of(folder: Path) -> tuple[str, int, int]:
    """Return the format of what is quantized, and the bits of its codes and of activations."""
    if is_gguf(folder):
        return gguf.FORMAT, GgufFile(folder).bits, 16
    name, reader, config = known_quantization(folder)
    bits = reader.bits(config)
    if bits is None:
        raise contradiction(f"the quantization configuration of `{name}` has no number of bits")
    return name, bits, act_bits(reader.rounding(config))


def must_match(label: str, folder: Path, base: Path) -> None:
    """Refuse a file of another architecture or another vocabulary than the base has."""
    if is_gguf(folder):
        gguf_base.must_match(label, read_header(folder), base, folder)
        return
    if (folder / "config.json").is_file() and (base / "config.json").is_file():
        own, theirs = read_configuration(folder), read_configuration(base)
        for key in _COMPARED:
            a, b = own.get(key), theirs.get(key)
            if a is not None and b is not None and a != b:
                raise gguf_base.other_model(label, key, a, b, base)
    own_table, base_table = (read_tokenizer(place) for place in (folder, base))
    part = differing_part(own_table, base_table) if own_table and base_table else ""
    if part:
        raise other_tokenizer(label, part, base)
