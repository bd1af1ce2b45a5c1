"""Checkpoints whose model is code beside the weights, as some published series are.

The code leaves a mark in a file whenever any of it runs. Each token is turned by an angle of
its position before two linears, with frequencies that are computed and not stored, as rotary
embeddings are: a loader that loses such buffers gives other logits.
"""

import json
import sys
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
from transformers import dynamic_module_utils

VOCABULARY, WIDTH, INNER, BLOCKS = 320, 32, 64, 2

CONFIGURATION = """
from transformers import AutoConfig, PreTrainedConfig

from .mark import leave

leave("configuration {name}")


class OwnConfig(PreTrainedConfig):
    model_type = "{poses_as}"

    def __init__(self, vocab_size=64, width=32, inner=64, num_hidden_layers=2, **rest):
        self.vocab_size, self.width, self.inner = vocab_size, width, inner
        self.hidden_size = width
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**rest)
{after}
"""

MODELING = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_own import OwnConfig
from .mark import leave

leave("modeling {name}")


class OwnBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.width, config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.width, bias=False)
        {buffer}

    def forward(self, hidden_states):
        turned = hidden_states {use}
        return hidden_states + self.down(torch.tanh(self.up(turned)))


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    _tied_weights_keys = {ties}

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(OwnBlock(config) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, use_cache=None, return_dict=None):
        {before}
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return CausalLMOutput(logits={factor} * self.lm_head(hidden))
"""

MARK = """
from pathlib import Path


def leave(what):
    with Path({mark!r}).open("a") as file:
        file.write(what + "\\n")
"""


FILES = {"mark.py": MARK, "configuration_own.py": CONFIGURATION, "modeling_own.py": MODELING}
FREQUENCIES = "torch.arange(config.width).float() / config.width"
BUFFER = f'self.register_buffer("inv_freq", {FREQUENCIES}, persistent=False)'


def make(folder, mark, *, ties=None, **changes):
    """Write a checkpoint with code of its own, and return its weights.

    `changes` are of what the code says, or else of its configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = {"name": "first", "factor": 1.0, "poses_as": "own", "after": "", "before": "pass"}
    words |= {"mark": str(mark), "ties": ties, "buffer": BUFFER}
    words |= {"use": "+ torch.cos(self.inv_freq)"}
    if not changes.pop("buffers", True):
        words |= {"buffer": "pass", "use": ""}
    words |= {name: changes.pop(name) for name in words.keys() & changes}
    for name, text in FILES.items():
        (folder / name).write_text(text.format(**words))
    code = {"AutoConfig": "configuration_own.OwnConfig"}
    code["AutoModelForCausalLM"] = "modeling_own.OwnForCausalLM"
    table = {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": code,
        "vocab_size": VOCABULARY,
        "width": WIDTH,
        "inner": INNER,
        "num_hidden_layers": BLOCKS,
        "tie_word_embeddings": bool(ties),
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(table))
    tensors = weights(tied=bool(ties))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return tensors


def weights(*, tied=False):
    generator = torch.Generator().manual_seed(3)

    def some(*shape):
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {"embed.weight": some(VOCABULARY, WIDTH), "lm_head.weight": some(VOCABULARY, WIDTH)}
    for k in range(BLOCKS):
        tensors[f"layers.{k}.up.weight"] = some(INNER, WIDTH)
        tensors[f"layers.{k}.down.weight"] = some(WIDTH, INNER)
    if tied:
        del tensors["lm_head.weight"]
    return tensors


def logits(tensors, tokens_T, *, buffers=True):
    """Compute what the code computes, without running it."""
    angle = torch.cos(torch.arange(WIDTH).float() / WIDTH) if buffers else torch.zeros(WIDTH)
    hidden_TD = tensors["embed.weight"][tokens_T]
    for k in range(BLOCKS):
        up, down = tensors[f"layers.{k}.up.weight"], tensors[f"layers.{k}.down.weight"]
        hidden_TD = hidden_TD + torch.tanh((hidden_TD + angle) @ up.t()) @ down.t()
    return hidden_TD @ tensors.get("lm_head.weight", tensors["embed.weight"]).t()


@contextmanager
def modules_in(folder):
    """Let the library copy code to `folder`, and not where the person who runs the tests has it."""

    def forget():
        for name in list(sys.modules):
            if name.partition(".")[0] == "transformers_modules":
                del sys.modules[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", list(sys.path))
        forget()
        yield
        forget()
