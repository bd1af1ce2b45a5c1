"""Releases that ship quantized, in the layouts of gpt-oss, DeepSeek and Kimi, written by hand.

Each is written twice: as it ships, and with the weights that it means in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import released
from tests.support.quantized import words

_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
_BLOCK = 16  # of fp8, small enough that matrices have several, the last one ragged

Coded = tuple[dict[str, Tensor], Tensor]
"""What is stored of a tensor, and what it means."""


def mxfp4(name: str, experts: Tensor) -> Coded | None:
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


def fp8(name: str, weight: Tensor) -> Coded | None:
    """Store matrices as DeepSeek does: 8-bit floats, a scale for each square block."""
    if ".layers." not in name or weight.dim() != 2 or name.endswith(".gate.weight"):
        return None
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    x = padded.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK))
    scales = x.abs().amax((1, 3)).clamp_min(1e-6) / 448
    wide = scales[:, None, :, None]
    codes = (x / wide).to(torch.float8_e4m3fn)

    def cut(blocks: Tensor) -> Tensor:
        return blocks.flatten(2).flatten(0, 1)[:rows, :columns]

    return {name: cut(codes), f"{name}_scale_inv": scales}, cut(codes.float() * wide)


def int4(name: str, weight: Tensor) -> Coded | None:
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
LAYOUTS: dict[str, tuple[str, Callable[[str, Tensor], Coded | None], dict[str, Any]]] = {
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


def write(folder: Path, layout: str, tokenizer: Path | None = None) -> tuple[Path, Path]:
    """Write a release as it ships and as it means; return both folders."""
    family, code, config = LAYOUTS[layout]
    ships, means = folder / layout, folder / f"{layout}-decoded"
    released.save(ships, family)
    tensors = load_file(ships / "model.safetensors")
    coded = {
        name: code(name, tensor) or ({name: tensor}, tensor) for name, tensor in tensors.items()
    }
    shutil.copytree(ships, means)
    save({k: t for stored, _ in coded.values() for k, t in stored.items()}, ships)
    save({name: tensor for name, (_, tensor) in coded.items()}, means)
    path = ships / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    for file in tokenizer.glob("tokenizer*") if tokenizer else ():
        for place in (ships, means):
            shutil.copy(file, place)
    return ships, means


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
