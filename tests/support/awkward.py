"""Small random models of shapes that are awkward for schemes."""

from __future__ import annotations

import dataclasses

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qaudit.core.registry import schemes
from tests.support.schemes import PLUGINS
from tests.support.tiny import TABLES

SHAPES = TABLES["awkward"]
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
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape])).save_pretrained(folder)
    return folder
