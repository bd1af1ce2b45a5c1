"""Losses of plain transformers, and rounding to nearest in place; written apart from qaudit."""

import re

import numpy as np
import torch
from torch import nn

from tests.support.reference.plain_gptq import find_scale

GROUP = 128


def rounded(weight_RC):
    """Round groups of columns to symmetric grids of 4 bits."""
    parts = []
    for part in weight_RC.split(GROUP, dim=1):
        w = part.double().numpy()
        scale, zero = find_scale(w, 4, True, "bf16")
        codes = np.clip(np.round(w / scale[:, None]) + zero[:, None], 0, 15)
        parts.append(torch.from_numpy((codes - zero[:, None]) * scale[:, None]))
    return torch.cat(parts, dim=1).to(weight_RC.dtype)


@torch.no_grad()
def losses(model, documents):
    result = []
    for tokens in documents:
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double()
        result.append(float(nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")))
    return result


def blocks_of(model):
    """Return the decoder's blocks: of its lists of modules, the one with the most parameters."""
    decoder = [m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList)]
    # Some classes have a decoder of which they do not tell.
    lists = decoder or [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters())))


@torch.no_grad()
def round_in_place(model, linears):
    """Round linears of each block; return how many there were, and which names are in no block."""
    count, unknown = 0, set(linears)
    for block in blocks_of(model):
        for name in linears:
            weight_RC = _weight(block, name)
            if weight_RC is None:
                continue
            weight_RC.copy_(rounded(weight_RC))
            count += 1
            unknown.discard(name)
    return count, unknown


def left(model, linears):
    """Return the linear layers of blocks that are not among `linears`."""
    return {
        name
        for block in blocks_of(model)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and name not in linears
    }


def _weight(block, name):
    modules = dict(block.named_modules())
    if name in modules:
        weight = modules[name].weight.data
        return weight.t() if type(modules[name]).__name__ == "Conv1D" else weight
    match = re.fullmatch(r"(.*)\.(\d+)\.(gate|up|down)_proj", name)
    if match is None or match[1] not in modules:
        return None
    return dict(_expert(modules[match[1]], int(match[2]))).get(match[3])


def _expert(module, index):
    """Yield the matrices of an expert, (R, C) each, as views of what the library stores."""
    kind = type(module).__name__
    if kind == "DbrxExperts":
        shape = (module.num_experts, -1, module.hidden_size)
        for role, name in (("gate", "w1"), ("up", "v1"), ("down", "w2")):
            weight = getattr(module.mlp, name).data.view(shape)[index]
            yield role, weight.t() if role == "down" else weight
        return
    transposed = getattr(module, "is_transposed", kind == "Llama4TextExperts")
    for name, parameter in module._parameters.items():
        if parameter is None or parameter.dim() != 3 or index >= len(parameter):
            continue
        weight = parameter.data[index].t() if transposed else parameter.data[index]
        if name == "gate_up_proj":
            half = len(weight) // 2
            together = getattr(module, "is_concatenated", True)
            yield "gate", weight[:half] if together else weight[0::2]
            yield "up", weight[half:] if together else weight[1::2]
        elif name in ("gate_proj", "up_proj", "down_proj"):
            yield name.removesuffix("_proj"), weight
