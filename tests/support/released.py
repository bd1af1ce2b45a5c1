"""Tiny models of two blocks with the tensors of releases: experts one by one, towers, scalars.

Those that ship quantized, in the layouts of gpt-oss, DeepSeek and Kimi, are written by hand, twice:
as a release ships, and with the weights that it means in float32.
"""

import json
import shutil

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from tests.support.models import text
from tests.support.quantized import words
from tests.support.reference.plain_gptq import find_scale
from tests.support.tiny import TABLES, save_moved

RELEASED, OTHERS = TABLES["released"], TABLES["others"]
FOR_LLAMA_CPP = TABLES["llama.cpp"]["gemma3"]
WRAPPERS = ("gemma3", "gemma4", "idefics3", "mistral_large4")
UNQUANTIZED = ("embed_tokens", "lm_head", "norm", "gate.weight", "router", "bias", "sinks")


def save(folder, family, seed=0, **changes):
    """Save a random model of a family as its releases are saved, without a tokenizer."""
    config = AutoConfig.for_model(family, **{**{**RELEASED, **OTHERS}[family], **changes})
    torch.manual_seed(seed)
    return save_moved(_auto(family).from_config(config, dtype=torch.float32), folder)


def plain(folder, family, dtype=torch.float32):
    """Load a model as its users do."""
    return _auto(family).from_pretrained(folder, dtype=dtype).eval()


def _auto(family):
    return AutoModelForImageTextToText if family in WRAPPERS else AutoModelForCausalLM


@torch.no_grad()
def plain_loss(folder, family):
    """Return the loss that transformers itself has on the evaluation text of tests, by token."""
    model, tokenizer = plain(folder, family), AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for seed in range(200, 212):
        tokens = torch.tensor([tokenizer(text(seed))["input_ids"]])
        for part in tokens.split(32, 1):
            logits = model(input_ids=part, use_cache=False).logits[0, :-1]
            nll = torch.nn.functional.cross_entropy(logits, part[0, 1:], reduction="sum")
            total, count = total + float(nll), count + part.shape[1] - 1
    return total / count


def rounded(weight):
    """Round each row to its own symmetric grid of 4 bits."""
    w = weight.double().numpy()
    scale, zero = find_scale(w, 4, True, "bf16")
    codes = np.clip(np.round(w / scale[:, None]) + zero[:, None], 0, 15)
    return torch.from_numpy((codes - zero[:, None]) * scale[:, None]).to(weight.dtype)


def round_file(folder):
    """Round every matrix of every expert and of attention in the files themselves."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if any(part in name for part in UNQUANTIZED):
            continue
        if tensor.dim() == 3:  # gpt-oss stores (experts, inputs, outputs)
            tensors[name] = torch.stack([rounded(w.T).T.contiguous() for w in tensor])
        else:
            tensors[name] = rounded(tensor)
    save_file(tensors, path, metadata={"format": "pt"})


def text_of_wrapper(folder, text):
    """Save the text of a Gemma 3 wrapper as a model of its own."""
    config = json.loads((folder / "config.json").read_text())["text_config"]
    text.mkdir()
    config |= {"architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": True}
    (text / "config.json").write_text(json.dumps(config))
    inside = "language_model."
    tensors = load_file(folder / "model.safetensors")
    own = {n.removeprefix(inside): t for n, t in tensors.items() if n.startswith(inside)}
    save_file(own, text / "model.safetensors", metadata={"format": "pt"})
    return text


_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
_BLOCK = 16  # of fp8, small enough that matrices have several, the last one ragged


def mxfp4(name, experts):
    """Store experts as gpt-oss does: blocks of 32 along columns, with an exponent each."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    x = experts.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(x.abs().amax(-1) / 6)) + 1
    scales = torch.exp2(exponents)[..., None]
    codes = (x / scales).unsqueeze(-1).sub(_FP4).abs().argmin(-1).to(torch.uint8)
    stored = {
        f"{name}_blocks": codes[..., 0::2] | (codes[..., 1::2] << 4),
        f"{name}_scales": (exponents + 127).to(torch.uint8),
    }
    return stored, (_FP4[codes.long()] * scales).flatten(-2).transpose(1, 2)


def fp8(name, weight):
    """Store matrices as DeepSeek does: 8-bit floats, a scale for each square block."""
    if ".layers." not in name or weight.dim() != 2 or name.endswith(".gate.weight"):
        return None
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    x = padded.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK))
    scales = x.abs().amax((1, 3)).clamp_min(1e-6) / 448
    wide = scales[:, None, :, None]
    codes = (x / wide).to(torch.float8_e4m3fn)

    def cut(blocks):
        return blocks.flatten(2).flatten(0, 1)[:rows, :columns]

    return {name: cut(codes), f"{name}_scale_inv": scales}, cut(codes.float() * wide)


def int4(name, weight):
    """Store experts as Kimi does: packed integers, a scale for 32 columns."""
    if ".mlp.experts." not in name:
        return None
    x = weight.unflatten(1, (-1, 32))
    scales = (x.abs().amax(-1) / 7).bfloat16()
    codes = (x / scales.float()[..., None]).round().clamp(-8, 7)
    base = name.removesuffix(".weight")
    stored = {
        f"{base}.weight_packed": words((codes.long() + 8).flatten(1), 4),
        f"{base}.weight_scale": scales,
        f"{base}.weight_shape": torch.tensor(weight.shape),
    }
    return stored, (codes * scales.float()[..., None]).flatten(1)


_INTEGERS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
LAYOUTS = {
    "gpt-oss": ("gpt_oss", mxfp4, {"quant_method": "mxfp4"}),
    "deepseek": (
        "deepseek_v3",
        fp8,
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [_BLOCK, _BLOCK]},
    ),
    "kimi": (
        "deepseek_v3",
        int4,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                       "re:.*mlp\\.(gate|up|down)_proj.*"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INTEGERS}},
        },
    ),
}  # fmt: skip


def write_quantized(folder, layout, tokenizer=None):
    """Write a release as it ships and as it means; return both folders."""
    family, code, config = LAYOUTS[layout]
    ships, means = folder / layout, folder / f"{layout}-decoded"
    save(ships, family)
    tensors = load_file(ships / "model.safetensors")
    coded = {name: code(name, one) or ({name: one}, one) for name, one in tensors.items()}
    shutil.copytree(ships, means)
    _store({k: t for stored, _ in coded.values() for k, t in stored.items()}, ships)
    _store({name: tensor for name, (_, tensor) in coded.items()}, means)
    path = ships / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    for file in tokenizer.glob("tokenizer*") if tokenizer else ():
        for place in (ships, means):
            shutil.copy(file, place)
    return ships, means


def _store(tensors, folder):
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
