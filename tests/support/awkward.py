"""Small random models of shapes that are awkward for schemes."""

from __future__ import annotations

import dataclasses

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qaudit.core.registry import schemes
from tests.support.passes import CONTEXT
from tests.support.schemes import PLUGINS

USUAL = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EVEN = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, **USUAL}
SHAPES = {
    "plain": ("llama", EVEN),
    "tied": ("llama", {**EVEN, "tie_word_embeddings": True}),
    "post-norm": ("olmo2", EVEN),
    # Widths of 60, 56 and 91, which no group of 16, 32, 128 or 256 divides; heads of 14.
    "odd": (
        "llama",
        {**EVEN, "hidden_size": 60, "head_dim": 14, "intermediate_size": 91},
    ),
    "layer-norm": (
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, **USUAL},
    ),
    "parallel": ("phi", {**EVEN, "num_key_value_heads": 4}),
    "experts": ("olmoe", {**EVEN, "num_experts": 4, "num_experts_per_tok": 2}),
}
NAMES = tuple(PLUGINS)
REFUSED = {
    ("smoothquant", "post-norm"): "no norm of block 0 can take the scales of `smoothquant`",
    **{(name, "odd"): "32" for name in NAMES if name.startswith("gguf-")},
}


def short(name: str) -> str:
    plugin = schemes()[name]
    has_bits = any(field.name == "bits" for field in dataclasses.fields(plugin))
    learned = [f.name for f in dataclasses.fields(plugin) if f.name in ("steps", "iters")]
    steps = f":{learned[0]}=2" if learned else ""
    return f"{name}-4bit{steps}" if has_bits else f"{name}{steps}"


def made(folder, shape):
    """Save a small random model."""
    family, config = SHAPES[shape]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    model.save_pretrained(folder)
    return folder
