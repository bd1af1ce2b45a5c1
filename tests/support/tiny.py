"""Tiny random models of every family, made at run time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 256

_USUAL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ONE_HEAD_SIZE = {k: v for k, v in _USUAL.items() if k not in ("num_key_value_heads", "head_dim")}
_SPECIAL = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {**_USUAL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING = {**_USUAL, "sliding_window": 16, "num_hidden_layers": 4}
_SHARING = {
    **_SLIDING,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _USUAL,
    "olmo": _USUAL,
    "olmo2": _USUAL,
    "olmo3": _SLIDING,
    "smollm3": {**_USUAL, "no_rope_layer_interval": 2},
    "gpt_neox": _ONE_HEAD_SIZE,
    "apertus": _USUAL,
    "qwen2": _USUAL,
    "qwen3": _USUAL,
    "gemma": _USUAL,
    "gemma2": _SLIDING,
    "gemma3_text": {**_SLIDING, "sliding_window_pattern": 2},
    "mistral": _SLIDING,
    "phi3": _USUAL,
    "granite": {**_USUAL, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, **_SPECIAL},
    "opt": {**_ONE_HEAD_SIZE, "ffn_dim": 128, "word_embed_proj_dim": 32},
    "starcoder2": _USUAL,
    "cohere": _USUAL,
    "glm4": _USUAL,
    "exaone4": {**_SLIDING, "sliding_window_pattern": 2},
    "nemotron": _USUAL,
    "stablelm": _USUAL,
    "phi": _USUAL,
    "glm": _USUAL,
    "cohere2": _SLIDING,
    "seed_oss": _USUAL,
    "falcon": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, **_SPECIAL},
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4, **_SPECIAL},
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, **_SPECIAL},
    "gpt_neo": {
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 16,
        "max_position_embeddings": 128,
        **_SPECIAL,
    },
    # Their last two blocks read keys and values of the first two, and all have inputs of their own.
    "gemma3n_text": {
        **_SHARING,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
    },
    "gemma4_text": {**_SHARING, "global_head_dim": 16},
}

WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {**_USUAL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**_EXPERTS, "num_key_value_heads": 4, "intermediate_size": 32},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
}
# What llama.cpp has in its code, whatever a configuration says.
FOR_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 7,
        "sliding_window_pattern": 6,
    },
}


def make(folder: Path, family: str, *, shard: str | None = None, **changes: Any) -> Path:
    """Save a random fp32 model of a family whose norms and biases are far from where they start."""
    config = AutoConfig.for_model(family, **{**{**FAMILIES, **WITH_EXPERTS}[family], **changes})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return save_moved(model, folder, **({"max_shard_size": shard} if shard else {}))


def save_moved(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model whose norms and biases are moved far from where they start."""
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.1 if parameter.dim() < 2 else 0.05
            parameter.add_(torch.randn_like(parameter) * scale)
    model.eval().save_pretrained(folder, **options)
    return folder


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return random tokens (B, T), none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)
