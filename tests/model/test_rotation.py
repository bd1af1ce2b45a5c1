"""Rotations leave every kind of model what it is, and round what QuaRot's folded ones round."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qaudit.core.floats import by_group
from qaudit.core.linears import Linears, Quantized
from qaudit.core.registry import parse_scheme
from qaudit.core.rotation import fused, rotate, rotated, rotation
from tests.support import passes, tiny

# gemma2, olmo2: norms behind sublayers; gpt2: tied, transposed matrices; phi: parallel sublayers;
# llama: pre-norm; phi3: q, k and v in one matrix; qwen3: norms of heads; starcoder2: LayerNorm.
FAMILIES = ["llama", "olmo2", "gemma2", "gpt2", "phi", "phi3", "qwen2", "qwen3", "starcoder2"]
RESIDUAL = {"llama", "phi3", "qwen2", "qwen3"}


def opened(folder):
    model = passes.opened(folder)
    model.inspector.rotations = True
    return model


def in_front(linears):
    weights = rotated(linears).weights
    assert not any(torch.equal(weights[name], one) for name, one in linears.weights.items())
    return Quantized(weights, 0, inputs=rotate)


def by_blocks(linears):
    turn = partial(by_group, size=16, change=rotate)
    return Quantized({name: turn(one) for name, one in linears.weights.items()}, 0, inputs=turn)


def by_quarot(linears):
    basis = fused(linears)
    weights = {name: basis.outwards(name, one) for name, one in basis.linears.weights.items()}
    return Quantized(weights, 0, inputs=basis.inputs)


@pytest.mark.parametrize(
    ("family", "turned"),
    [*product(FAMILIES, (in_front, by_quarot)), ("llama", by_blocks), ("gpt2", by_blocks)],
)
@torch.no_grad()
def test_rotations_alone_leave_no_divergence(family, turned, once):
    model = opened(once(tiny.make, family))
    plain_BTD = turned_BTD = model.embed(tiny.tokens(2, 24))
    width = plain_BTD.shape[-1]
    for block in model.blocks():
        plain_BTD = block.forward(plain_BTD)
        for group in block.groups:
            block.install(turned(block.linears(group)))
        turned_BTD = block.forward(turned_BTD)
        widths = [rows.width for group in block.groups for rows in (group.rows or {}).values()]
        assert (width in widths) == (family in RESIDUAL)
        assert min(widths, default=width) < width  # values of heads
    plain, turned = (model.logits(x).double().log_softmax(-1) for x in (plain_BTD, turned_BTD))
    assert not torch.equal(plain, turned)
    assert float((plain.exp() * (plain - turned)).sum(-1).mean()) < 1e-6


# --------------------------------------------------------- QuaRot as published, on a whole Llama


def _columns(linear, turn):
    linear.weight.data = (linear.weight.data.double() @ turn).float()


def _rows(linear, turn):
    linear.weight.data = (turn.T @ linear.weight.data.double()).float()


def _heads(width, count):
    return torch.block_diag(*[rotation(width)] * count)


def quarot(folder):
    """Fold norms, R1 and R2 into a whole model, and rotate across heads and before down online."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.clone())
    size, width = model.config.hidden_size, model.config.head_dim
    turn = rotation(size)
    embedding = model.model.embed_tokens.weight
    embedding.data = (embedding.data.double() @ turn).float()
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            for linear in readers:
                linear.weight.data *= norm.weight.data
                _columns(linear, turn)
            norm.weight.data.fill_(1)
        for linear in (attention.o_proj, mlp.down_proj):
            _rows(linear, turn)
        _rows(attention.v_proj, _heads(width, model.config.num_key_value_heads))
        heads = attention.o_proj.in_features // width
        _columns(attention.o_proj, _heads(width, heads))
        across = torch.kron(rotation(heads), torch.eye(width).double())
        _columns(attention.o_proj, across)
        _online(attention.o_proj, across)
        down = rotation(mlp.down_proj.in_features)
        _columns(mlp.down_proj, down)
        _online(mlp.down_proj, down)
    model.lm_head.weight.data *= model.model.norm.weight.data
    model.model.norm.weight.data.fill_(1)
    _columns(model.lm_head, turn)
    return model


def _online(linear, turn):
    linear.register_forward_pre_hook(lambda _, args: ((args[0].double() @ turn).float(),))


@pytest.mark.parametrize("act", [16, 4])
@torch.no_grad()
def test_quarot_rounds_what_folded_rotations_round(act, once):
    # Heads and their sizes are powers of two: there all rotations are QuaRot's.
    folder = once(tiny.make, "llama")
    whole = quarot(folder)
    tokens_BT = tiny.tokens(2, 24)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = whole(tokens_BT).logits
    torch.testing.assert_close(expected, plain(tokens_BT).logits, atol=2e-4, rtol=0)
    both = (f"act={act}", "rotate=false")
    scheme, plainly = (parse_scheme(f"quarot-rtn-4bit:{rest}") for rest in both)
    for module in whole.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = plainly.quantize(Linears({"w": module.weight.data})).weights["w"]
            if act < 16:
                module.register_forward_pre_hook(_round_tokens)
    expected = whole(tokens_BT).logits
    model = opened(folder)
    hidden_BTD = model.embed(tokens_BT)
    for block in model.blocks():
        for group in block.groups:
            block.install(scheme.quantize(block.linears(group)))
        hidden_BTD = block.forward(hidden_BTD)
    off = (model.logits(hidden_BTD) - expected).norm() / (expected - plain(tokens_BT).logits).norm()
    # In float32 one value in some thousands may be at a tie and fall to another side.
    assert off < 1e-3


def _round_tokens(_, args):
    (x,) = args
    scale = 0.9 * x.abs().amax(-1, keepdim=True) / 7
    return ((x / scale).round().clamp(-8, 7) * scale,)
