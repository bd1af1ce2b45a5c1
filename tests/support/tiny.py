"""Tiny random models of every family, made at run time."""

from pathlib import Path

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.planning.sizes import Sizes

TABLES = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text(encoding="utf-8"))
FAMILIES, FOR_LLAMA_CPP = TABLES["dense"], TABLES["llama.cpp"]


def make(folder, family, *, shard=None, **changes):
    """Save a random fp32 model of a family whose norms and biases are far from where they start."""
    table = FAMILIES.get(family) or TABLES["experts"][family]
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**table, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return save_moved(model, folder, **({"max_shard_size": shard} if shard else {}))


def save_moved(model, folder, **options):
    """Save a model whose norms and biases are moved far from where they start."""
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.1 if parameter.dim() < 2 else 0.05
            parameter.add_(torch.randn_like(parameter) * scale)
    model.eval().save_pretrained(folder, **options)
    return folder


def tokens(batch, length, seed=0):
    """Return random tokens (B, T), none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (batch, length), generator=generator)


def header_sizes(folder):
    """Return the sizes of a folder's weights, by their headers."""
    weights = WeightFolder(folder)
    return Sizes.of({name: weights.shape(name) for name in weights.names()}, str(folder))
