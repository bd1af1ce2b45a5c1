"""The model types that tests hold equal to `transformers`. No torch."""

from __future__ import annotations

from typing import Any

STREAMABLE = frozenset({
    "apertus", "bloom", "cohere", "cohere2", "exaone4", "falcon", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "gpt2", "gpt_neo", "gpt_neox", "gptj", "granite", "llama",
    "mistral", "nemotron", "olmo", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip
"""Model types whose streamed logits are held bit-identical to `transformers` by a test."""

BRANCHING = frozenset({
    "apertus", "cohere", "glm", "glm4", "gpt2", "gpt_neox", "gptj", "granite", "llama",
    "mistral", "nemotron", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip
"""Model types that read trees as they read each of their sequences alone, which a test holds."""


def slides(config: Any) -> bool:
    """Return whether some layer sees a part of the text alone, which other masks would undo."""
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds:
        return kinds != {"full_attention"}
    window = getattr(config, "sliding_window", None)
    return window is not None and bool(getattr(config, "use_sliding_window", True))
