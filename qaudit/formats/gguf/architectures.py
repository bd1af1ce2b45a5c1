"""Architectures of llama.cpp that are read: which models they are, and what its converter changes.

Each is held to llama.cpp's own logits of a tiny file (tests/peers/test_llamacpp.py). Facts are
those of the classes in `convert_hf_to_gguf.py` and of `src/models/*.cpp` (b11549).
"""

from __future__ import annotations

from dataclasses import dataclass

_SILU, _TANH = ("silu", "swish"), ("gelu_pytorch_tanh",)


@dataclass(frozen=True)
class Architecture:
    """What is in the code of llama.cpp and of its converter, and not in a file."""

    types: tuple[str, ...]  # `model_type` of the models it is made from
    interleaved: bool = False  # the halves of each head's rows take turns in q and k
    adds_one: bool = False  # to the weights of norms, which are stored without it
    epsilon: str = "rms_norm_eps"
    layer_norms: bool = False
    activations: tuple[str, ...] = _SILU
    period: int = 0  # the last of so many layers attends without a window, the others with one
    normalizes: bool | None = None  # whether the weights of a token's experts sum to 1


ARCHITECTURES = {
    "llama": Architecture(("llama", "mistral", "mixtral"), interleaved=True, normalizes=True),
    "olmo": Architecture(("olmo",), interleaved=True, layer_norms=True, epsilon=""),
    "olmo2": Architecture(("olmo2", "olmo3")),
    "olmoe": Architecture(("olmoe",), normalizes=False),
    "qwen2": Architecture(("qwen2",)),
    "qwen2moe": Architecture(("qwen2_moe",), normalizes=False),
    "qwen3": Architecture(("qwen3",)),
    "qwen3moe": Architecture(("qwen3_moe",), normalizes=True),
    "smollm3": Architecture(("smollm3",), interleaved=True),
    "gemma": Architecture(("gemma",), adds_one=True, activations=_TANH),
    "gemma2": Architecture(("gemma2",), adds_one=True, activations=_TANH, period=2),
    "gemma3": Architecture(("gemma3_text",), adds_one=True, activations=_TANH, period=6),
    "granite": Architecture(("granite",), interleaved=True),
    "phi3": Architecture(("phi3",)),
    "starcoder2": Architecture(
        ("starcoder2",), layer_norms=True, epsilon="norm_epsilon", activations=_TANH
    ),
    "nemotron": Architecture(
        ("nemotron",), adds_one=True, layer_norms=True, epsilon="norm_eps", activations=("relu2",)
    ),
    "stablelm": Architecture(("stablelm",), layer_norms=True, epsilon="layer_norm_eps"),
    "command-r": Architecture(("cohere",), layer_norms=True, epsilon="layer_norm_eps"),
    "cohere2": Architecture(("cohere2",), layer_norms=True, epsilon="layer_norm_eps", period=4),
}
