"""Write the defaults that GGUF files are compared by: `python -m tests.support.gguf_defaults`."""

import json
import re

from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from qaudit.formats.gguf.architectures import ARCHITECTURES
from tests.house.source import PACKAGE

FOLDER = PACKAGE / "formats" / "gguf"
SOURCES = ("metadata.py", "architectures.py")
NAMES = {name for s in SOURCES for name in re.findall(r'"(\w+)"', (FOLDER / s).read_text("utf-8"))}


GROWN = {"hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 2}
SIZES = {*GROWN, "model_type", "layer_types", "vocab_size", "num_hidden_layers", "n_layer",
         "n_layers", "n_head", "n_heads", "n_embd", "d_model", "hidden_act"}  # fmt: skip


def defaults_of(model_type):
    """Return the numbers, flags and names that a type has whatever its sizes are."""
    kind = CONFIG_MAPPING[model_type]
    config = kind()
    sizes = {name: getattr(config, name, None) for name in GROWN}
    grown = {name: GROWN[name] * size for name, size in sizes.items() if size}
    usual = _values(config)
    try:
        other = _values(kind(**grown))
    except StrictDataclassClassValidationError:  # of Mamba: its sizes belong together
        other = usual
    act = {"hidden_act": usual["hidden_act"]} if usual.get("hidden_act", "silu") != "silu" else {}
    return act | {
        name: usual[name]
        for name in sorted(NAMES & set(usual) - SIZES)
        if isinstance(usual[name], int | float | str) and usual[name] == other.get(name)
    }


def _values(config):
    values = config.to_dict()
    for part in ("attn_config", "ffn_config"):
        values |= values.get(part) or {}
    rope = values.get("rope_parameters") or {}
    local = rope.get("sliding_attention") or {}
    rope = rope.get("full_attention") or rope
    values |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    return values | {"rope_local_base_freq": local.get("rope_theta")}


def table():
    types = sorted({one for code in ARCHITECTURES.values() for one in code.types})
    return {one: defaults_of(one) for one in types}


def text():
    rows = (f"  {json.dumps(one)}: {json.dumps(values)}" for one, values in table().items())
    return "{\n" + ",\n".join(rows) + "\n}\n"


if __name__ == "__main__":
    (FOLDER / "defaults.json").write_text(text(), encoding="utf-8")
