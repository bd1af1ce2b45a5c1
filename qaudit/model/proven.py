"""The model types that tests hold equal to `transformers`. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STREAMABLE = frozenset({
    "apertus", "bloom", "cohere", "cohere2", "deepseek_v4", "exaone4", "falcon", "falcon_h1",
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm_moe_dsa", "gpt2", "gpt_neo", "gpt_neox", "gpt_oss",
    "gptj", "granite", "hy_v4", "idefics3", "llama", "mistral", "mistral_large4", "mixtral",
    "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "rwkv", "seed_oss", "smollm3", "stablelm", "starcoder2",
    "zaya",
})  # fmt: skip
"""Model types whose streamed logits are held bit-identical to `transformers` by a test."""

BRANCHING = frozenset({
    "apertus", "cohere", "glm", "glm4", "gpt2", "gpt_neox", "gptj", "granite", "llama",
    "mistral", "nemotron", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip
"""Model types that read trees as they read each of their sequences alone, which a test holds."""


_SLIDING = {"mistral": 4096}
"""The windows of families that slide where `config.json` names none."""


def reads_trees(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration's model reads trees: no other mask, no layer that slides.

    True of a `config.json` means true of the model; what the file leaves open counts as sliding.
    """
    model_type = str(config.get("model_type"))
    if model_type not in BRANCHING:
        return False
    kinds = config.get("layer_types")
    if isinstance(kinds, Sequence) and kinds:
        return all(kind == "full_attention" for kind in kinds)
    window = config.get("sliding_window", _SLIDING.get(model_type))
    return window is None or config.get("use_sliding_window", True) is False
