"""Tiny models of two blocks with the tensors of releases: experts one by one, towers, scalars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from tests.support.models import SHAPE, VOCABULARY, text
from tests.support.reference.plain_gptq import find_scale
from tests.support.tiny import save_moved

WRAPPERS = ("gemma3", "gemma4", "idefics3", "mistral_large4")

UNQUANTIZED = ("embed_tokens", "lm_head", "norm", "gate.weight", "router", "bias", "sinks")

TEXT: dict[str, Any] = {**SHAPE, "head_dim": 16}
EXPERTS = {**TEXT, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# The second block reads indices that the first one's indexer chose: 8 of up to 24 tokens.
SPARSE = {
    **TEXT,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "indexer_types": ["full", "shared"],
    "mlp_layer_types": ["dense", "sparse"],
}
RELEASED: dict[str, dict[str, Any]] = {
    "apertus": TEXT,
    "olmo_hybrid": {**TEXT, **LINEAR},
    "falcon_h1": {
        **TEXT,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 16},
        "vision_config": VISION,
        "mm_tokens_per_image": 1,
        "image_token_index": VOCABULARY - 1,
    },
    "gemma4": {  # with experts, and a block that reads keys and values of the one before
        "text_config": {
            **EXPERTS,
            "pad_token_id": 0,
            "top_k_experts": 2,
            "enable_moe_block": True,
            "num_kv_shared_layers": 1,
            "layer_types": ["full_attention"] * 2,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        "vision_config": VISION,
        "audio_config": None,
        "image_token_id": VOCABULARY - 1,
        "video_token_id": VOCABULARY - 2,
        "audio_token_id": VOCABULARY - 3,
    },
    "gemma4_unified_text": {**TEXT, "global_head_dim": 16, "sliding_window": 16},
    "glm_moe_dsa": SPARSE,
    "hy_v4": {**SPARSE, "hc_mult": 2},
    "idefics3": {  # asks its first parameter, which is of a tower, for the device
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": VISION,
        "image_token_id": VOCABULARY - 1,
    },
    "mistral_large4": {
        "text_config": {**SPARSE, "kv_source_layers": [0, 0]},
        "vision_config": VISION,
    },
    "deepseek_v4": {  # a router by tokens, and several hidden states for each of them
        **SPARSE,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 16,
        "hc_mult": 2,
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
        "indexer_types": None,
    },
    "rwkv": {
        "hidden_size": 32,
        "attention_hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "context_length": 64,
    },
    "zaya": {
        **EXPERTS,
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
    },
    "olmoe": {**EXPERTS, "intermediate_size": 32},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS,
    "mixtral": {**EXPERTS, "num_local_experts": 8},
    "gpt_oss": {**EXPERTS, "num_local_experts": 8, "intermediate_size": 32},
}


# Not held bit-identical, or of rare layouts; some of them are refused.
OTHERS: dict[str, dict[str, Any]] = {
    "llama4_text": {**EXPERTS, "num_local_experts": 8, "intermediate_size_mlp": 64},
    "deepseek_v3": {
        **TEXT,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
    },
    "jetmoe": {**TEXT, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def save(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """Save a random model of a family as its releases are saved, without a tokenizer."""
    config = AutoConfig.for_model(family, **{**{**RELEASED, **OTHERS}[family], **changes})
    auto: Any = AutoModelForImageTextToText if family in WRAPPERS else AutoModelForCausalLM
    torch.manual_seed(seed)
    return save_moved(auto.from_config(config, dtype=torch.float32), folder)


def plain(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Load a model as its users do."""
    auto: Any = AutoModelForImageTextToText if family in WRAPPERS else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def plain_loss(folder: Path, family: str) -> float:
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


def rounded(weight: Tensor) -> Tensor:
    """Round each row to its own symmetric grid of 4 bits."""
    w = weight.double().numpy()
    scale, zero = find_scale(w, 4, True, "bf16")
    codes = np.clip(np.round(w / scale[:, None]) + zero[:, None], 0, 15)
    return torch.from_numpy((codes - zero[:, None]) * scale[:, None]).to(weight.dtype)


def round_file(folder: Path) -> None:
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


def text_of_wrapper(folder: Path, text: Path) -> Path:
    """Save the text of a Gemma 3 wrapper as a model of its own."""
    config = json.loads((folder / "config.json").read_text())["text_config"]
    text.mkdir()
    (text / "config.json").write_text(
        json.dumps({**config, "architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": True})
    )
    inside = "language_model."
    tensors = load_file(folder / "model.safetensors")
    own = {n.removeprefix(inside): t for n, t in tensors.items() if n.startswith(inside)}
    save_file(own, text / "model.safetensors", metadata={"format": "pt"})
    return text


FOR_LLAMA_CPP = {  # what llama.cpp has in its code of Gemma 3
    "text_config": {
        **TEXT,
        "num_hidden_layers": 7,
        "sliding_window": 16,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 16,
    }
}
