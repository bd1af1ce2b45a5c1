"""What a quantized repository says of itself, before any tensor is read. No torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from qaudit.checkpoints.configuration import read_configuration
from qaudit.formats.activations import act_bits
from qaudit.formats.packing import Identity
from qaudit.formats.reading import QuantizedWeights, contradiction
from qaudit.formats.registry import file_format
from qaudit.formats.tokenizers import differing_part, other_model, other_tokenizer, read_tokenizer
from qaudit.formats.weights import QuantizedFolder, known_quantization

_COMPARED = (
    "model_type", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads",
    "n_head", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "hidden_act",
    "rope_theta",
)  # fmt: skip


def open_quantized(place: Path, *, base: Collection[str] = ()) -> QuantizedWeights:
    form = file_format(place)
    return form.open_file(place, base) if form else QuantizedFolder(place, base=base)


def format_of(folder: Path) -> Identity:
    if form := file_format(folder):
        return form.identify(folder)
    name, reader, config = known_quantization(folder)
    bits = reader.bits(config)
    if bits is None:
        raise contradiction(f"the quantization configuration of `{name}` has no number of bits")
    return name, bits, act_bits(reader.rounding(config))


def must_match(label: str, folder: Path, base: Path) -> None:
    """Refuse a file of another architecture or another vocabulary than the base has."""
    if form := file_format(folder):
        form.must_match(label, folder, base)
        return
    if (folder / "config.json").is_file() and (base / "config.json").is_file():
        own, theirs = read_configuration(folder), read_configuration(base)
        for key in _COMPARED:
            a, b = own.get(key), theirs.get(key)
            if a is not None and b is not None and a != b:
                raise other_model(label, key, a, b, base)
    own_table, base_table = (read_tokenizer(place) for place in (folder, base))
    part = differing_part(own_table, base_table) if own_table and base_table else ""
    if part:
        raise other_tokenizer(label, part, base)
