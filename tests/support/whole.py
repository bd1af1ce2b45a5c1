"""Whole tiny models that a peer quantizes: of Llama's and of OLMo 2's shape, and what they say.

Weights are random, with columns and rows of very different sizes. The tokens that calibrate are
fixed, and a second draw of them says by how much results differ for that reason alone.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qaudit.engine.batches import make_batches
from qaudit.engine.tokens import Feed
from qaudit.types import Window
from tests.support.models import save_tokenizer
from tests.support.passes import CONFIGS, SHAPE, tallies_of

LENGTH, DOCUMENTS, VOCABULARY = 64, 16, 256
FAMILIES = tuple(CONFIGS)


def save(folder, family, kv_heads=2):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    shape = {**SHAPE, **sizes, "num_key_value_heads": kv_heads, "max_position_embeddings": LENGTH}
    torch.manual_seed(0)
    config = CONFIGS[family](**shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(torch.exp(0.5 * torch.randn(len(parameter), 1)))
        elif "norm" in name:
            parameter.data.mul_(torch.exp(0.5 * torch.randn(len(parameter))))
    model.save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY)
    return folder


def tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (DOCUMENTS, LENGTH), generator=generator)


def groups_here(folder, spec, calibration_BT):
    """Return every group of linears that a scheme quantizes, in order, and what it makes of it."""
    groups = []

    def observe(scheme, linears, quantized):
        copies = [{n: w.clone() for n, w in one.weights.items()} for one in (linears, quantized)]
        both = zip((linears, quantized), copies, strict=True)
        groups.append(tuple(replace(one, weights=kept) for one, kept in both))

    windows = [Window(k, row.numpy().astype(np.int32)) for k, row in enumerate(calibration_BT)]
    feed = Feed(make_batches(windows, LENGTH, LENGTH), make_batches(windows[:1], LENGTH, LENGTH))
    with TemporaryDirectory() as spilled:
        tallies_of(folder, spec, Path(spilled), feed, observe=observe)
    return groups


def quantized_here(folder, spec, calibration_BT):
    """Return what a scheme makes of every linear of the model, by its name in the model."""
    return {
        f"model.layers.{linears.block}.{name}": weight_RC
        for linears, quantized in groups_here(folder, spec, calibration_BT)
        for name, weight_RC in quantized.weights.items()
    }


@torch.no_grad()
def logits(folder, weights):
    """Return the logits of the model on text of its own, with some weights replaced."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, weight_RC in weights.items():
        module = model.get_submodule(name)
        assert isinstance(module.weight, nn.Parameter)  # of a linear or a norm
        module.weight.data = weight_RC.float()
    out = model(tokens(99)).logits.double().log_softmax(-1)
    return out


def divergence(a, b):
    return float((a.exp() * (a - b)).sum(-1).mean())


def assert_within_noise(folder, spec, theirs, share=1.0):
    """Hold a peer's whole model to ours: apart by a share of what another draw of text changes."""
    first, second = tokens(1), tokens(2)
    full = logits(folder, {})
    ours = logits(folder, quantized_here(folder, spec, first))
    again = logits(folder, quantized_here(folder, spec, second))
    peer = logits(folder, theirs(first))
    noise, apart = divergence(ours, again), divergence(ours, peer)
    costs = [divergence(full, one) for one in (ours, peer, again)]
    assert apart < share * noise, (apart, noise, costs)
    assert abs(costs[0] - costs[1]) < max(abs(costs[0] - costs[2]), 0.1 * costs[0])
