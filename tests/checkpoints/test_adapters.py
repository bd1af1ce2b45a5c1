"""Adapters merged as PEFT merges them, and adapters that are refused by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qaudit.checkpoints.adapters import AdaptedWeights, read_adapter
from qaudit.checkpoints.safetensors import ADAPTER, ADAPTER_WEIGHTS, WeightFolder
from qaudit.errors import QauditError

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ranks": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"v_proj": 3},
    },
    "rank-stabilized": {"use_rslora": True},
    "dora": {"use_dora": True},
    "whole modules": {"modules_to_save": ["lm_head"]},
    "biases": {"bias": "lora_only"},
}
# PEFT calls what transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def write(
    folder: Path, *, dtype: torch.dtype = torch.float32, model: str = "qwen2", **settings: Any
) -> Any:
    """Write a base and an adapter of it whose every weight is drawn; return the base's model."""
    import peft
    from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

    torch.manual_seed(0)
    if model == "gpt2":
        config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
        settings = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, **settings}
    else:
        config = Qwen2Config(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=64, tie_word_embeddings=False,
        )  # fmt: skip
        settings = {"target_modules": TARGETS, **settings}
    base = AutoModelForCausalLM.from_config(config, dtype=dtype)
    base.save_pretrained(folder / "base")
    lora = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)
    adapted = peft.get_peft_model(base, lora)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    with warnings.catch_warnings(action="ignore"):  # that embeddings are saved, too
        adapted.save_pretrained(folder / "adapter")
    return adapted


def merged_by_peft(folder: Path) -> dict[str, torch.Tensor]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto")
    merged = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()
    return dict(merged.state_dict())


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_is_that_of_merge_and_unload(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    write(tmp_path, dtype=dtype, **SETTINGS[name])
    check(tmp_path, changed=9)


def test_transposed_linears_and_embeddings_are_those_of_merge_and_unload(tmp_path: Path) -> None:
    write(tmp_path / "gpt2", model="gpt2")
    check(tmp_path / "gpt2", changed=6)
    write(tmp_path / "embedding", target_modules=["embed_tokens", "q_proj"])
    check(tmp_path / "embedding", changed=3)


def check(folder: Path, changed: int) -> None:
    base = WeightFolder(folder / "base")
    weights, peft = AdaptedWeights(base, folder / "adapter"), merged_by_peft(folder)
    assert sum(not torch.equal(base.read(n), weights.read(n)) for n in base.names()) >= changed
    for name in weights.names():
        ours, theirs = weights.read(name), peft[name]
        assert ours.dtype == theirs.dtype
        # Both compute in float32 and round once: at most one unit in the last place apart.
        unit = 1e-6 if ours.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(ours, theirs, rtol=unit, atol=1e-6)


def edit(folder: Path, **keys: Any) -> None:
    path = folder / "adapter" / ADAPTER
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def drop(folder: Path, ending: str) -> None:
    tensors = load_file(folder / "adapter" / ADAPTER_WEIGHTS[0])
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "adapter" / ADAPTER_WEIGHTS[0])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "`IA3`"),
    "other arithmetic": ({"alora_invocation_tokens": [1]}, "`alora_invocation_tokens`"),
    "no rank": ({"r": 0}, "`r` is 0"),
    "another rank": ({"r": 3}, "asks for [3, "),
    "a pattern that explodes": ({"rank_pattern": {"(a+)+": 2}}, "`(a+)+`"),
    "no pattern": ({"rank_pattern": {"(": 2}}, "cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_merged_is_refused_by_name(tmp_path: Path, name: str) -> None:
    keys, words = REFUSED[name]
    write(tmp_path)
    edit(tmp_path, **keys)
    with pytest.raises(QauditError) as error:
        AdaptedWeights(WeightFolder(tmp_path / "base"), tmp_path / "adapter")
    assert words in str(error.value)


def test_an_adapter_without_a_part_or_of_another_base_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    drop(tmp_path, "layers.0.self_attn.q_proj.lora_A.weight")
    with pytest.raises(QauditError, match=r"of `model.layers.0.self_attn.q_proj` only"):
        AdaptedWeights(WeightFolder(tmp_path / "base"), tmp_path / "adapter")
    write(tmp_path / "gpt2", model="gpt2")
    with pytest.raises(QauditError, match="its base does not hold"):
        AdaptedWeights(WeightFolder(tmp_path / "gpt2" / "base"), tmp_path / "adapter")
    assert read_adapter(tmp_path / "adapter").rank == 4
