"""Architectures of llama.cpp that are read: which models they are, and what its converter changes.

Each is held to llama.cpp's own logits of a tiny file (tests/peers/test_llamacpp.py). Facts are
those of the classes in `convert_hf_to_gguf.py` and of `src/models/*.cpp` (b11549).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qaudit.formats.gguf import moves
from qaudit.formats.gguf.moves import Move

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""How llama.cpp makes weights of a router's logits (`expert_gating_func`)."""
_SILU, _TANH = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")

_MULTIPLIERS = {
    "attention.scale": (0, "attention_multiplier"),
    "embedding_scale": (1.0, "embedding_multiplier"),
    "residual_scale": (1.0, "residual_multiplier"),
    "logit_scale": (None, "logits_scaling"),
}
_STATE = {
    "ssm.state_size": (None, "ssm_state_size", "mamba_d_state", "state_size",
                       "linear_key_head_dim"),
    "ssm.group_count": (0, "n_groups", "mamba_n_groups", "linear_num_key_heads"),
}  # fmt: skip
_WITHOUT_ATTENTION = (
    "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "rope.dimension_count",
)  # fmt: skip
_LOGITS = {"logit_scale": (None, "logit_scale")}
_FREE_OF_LATENTS = (
    "attention.key_length", "attention.value_length", "attention.head_count_kv",
)  # fmt: skip
_EXPERTS_EVERYWHERE: Mapping[str, tuple[object, ...]] = {
    "mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1),
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """What is in the code of llama.cpp and of its converter, and not in a file."""

    types: tuple[str, ...]  # `model_type` of the models it is made from
    interleaved: bool = False  # the halves of each head's rows take turns in q and k
    adds_one: bool = False  # to the weights of norms, which are stored without it
    epsilon: str = "rms_norm_eps"
    layer_norms: bool = False
    activations: tuple[str, ...] = _SILU  # none where a configuration has no name of one
    period: int = 0  # the last of so many layers attends without a window, the others with one
    normalizes: bool | None = None  # whether the weights of a token's experts sum to 1
    gating: int = SOFTMAX  # where a file does not tell
    moves: tuple[Move, ...] = ()
    needs: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """What the code has, by names of a configuration; None where it may have none."""
    keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Further keys: what llama.cpp takes without one, and names of a configuration."""
    free: tuple[str, ...] = ()  # sizes, which llama.cpp holds against the tensors
    layered: bool = False  # blocks of several kinds: in some, counts of heads are 0


ARCHITECTURES = {
    "llama": Architecture(
        ("llama", "mistral", "mixtral", "internlm3", "iquestcoder"),
        interleaved=True, normalizes=True,
    ),
    "olmo": Architecture(("olmo",), interleaved=True, layer_norms=True, epsilon=""),
    "olmo2": Architecture(("olmo2", "olmo3")),
    "olmoe": Architecture(
        ("olmoe",), normalizes=False, needs={**_EXPERTS_EVERYWHERE, "clip_qkv": (None,)}
    ),
    "qwen2": Architecture(("qwen2",)),
    "qwen2moe": Architecture(("qwen2_moe",), normalizes=False, needs=_EXPERTS_EVERYWHERE),
    "qwen3": Architecture(("qwen3",)),
    "qwen3moe": Architecture(("qwen3_moe",), normalizes=True, needs=_EXPERTS_EVERYWHERE),
    "smollm3": Architecture(("smollm3",), interleaved=True),
    "gemma": Architecture(("gemma",), adds_one=True, activations=_TANH),
    "gemma2": Architecture(("gemma2",), adds_one=True, activations=_TANH, period=2),
    "gemma3": Architecture(("gemma3_text",), adds_one=True, activations=_TANH, period=6),
    "granite": Architecture(
        ("granite",), interleaved=True, keys=_MULTIPLIERS
    ),
    "granitemoe": Architecture(
        ("granitemoe", "granitemoeshared"), interleaved=True, keys=_MULTIPLIERS,
        moves=moves.GRANITE,
    ),
    "phi3": Architecture(("phi3",)),
    "starcoder2": Architecture(
        ("starcoder2",), layer_norms=True, epsilon="norm_epsilon", activations=_TANH
    ),
    "nemotron": Architecture(
        ("nemotron",), adds_one=True, layer_norms=True, epsilon="norm_eps", activations=("relu2",)
    ),
    "stablelm": Architecture(("stablelm",), layer_norms=True, epsilon="layer_norm_eps"),
    "command-r": Architecture(
        ("cohere",), layer_norms=True, epsilon="layer_norm_eps", keys=_LOGITS
    ),
    "cohere2": Architecture(
        ("cohere2",), layer_norms=True, epsilon="layer_norm_eps", period=4, keys=_LOGITS
    ),
    "gpt-oss": Architecture(
        ("gpt_oss",), period=2, gating=SOFTMAX_OF_CHOSEN, moves=moves.GPT_OSS,
        needs={"swiglu_limit": (None, 7.0)},
    ),
    "arcee": Architecture(("arcee",), interleaved=True, activations=("relu2",)),
    "seed_oss": Architecture(("seed_oss",)),
    "glm4": Architecture(("glm4",)),
    "glm4moe": Architecture(("glm4_moe",), gating=SIGMOID),
    "ernie4_5": Architecture(("ernie4_5",)),
    "ernie4_5-moe": Architecture(
        ("ernie4_5_moe",), normalizes=True,
        keys={"interleave_moe_layer_step": (None, "moe_layer_interval")},
    ),
    "hunyuan-dense": Architecture(("hunyuan_v1_dense",)),
    "lfm2": Architecture(
        ("lfm2",), epsilon="norm_eps", free=("feed_forward_length",), layered=True
    ),
    "lfm2moe": Architecture(
        ("lfm2_moe",), epsilon="norm_eps", normalizes=True, layered=True, moves=moves.LFM2_MOE
    ),
    "deepseek2": Architecture(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), free=_FREE_OF_LATENTS,
    ),
    "falcon": Architecture(
        ("falcon",), layer_norms=True, epsilon="layer_norm_epsilon", activations=("gelu",),
        moves=moves.BY_GROUPS,
        needs={"alibi": (None, False), "parallel_attn": (None, True), "bias": (None, False)},
    ),
    "bloom": Architecture(
        ("bloom",), layer_norms=True, epsilon="layer_norm_epsilon", activations=(),
        moves=moves.BY_GROUPS, needs={"apply_residual_connection_post_layernorm": (None, False)},
    ),
    "dbrx": Architecture(
        ("dbrx",), layer_norms=True, epsilon="", normalizes=True, moves=moves.DBRX
    ),
    "gpt2": Architecture(
        ("gpt2",), layer_norms=True, epsilon="layer_norm_epsilon", activations=_TANH,
        moves=moves.GPT2,
        needs={"scale_attn_weights": (None, True), "add_cross_attention": (None, False),
               "scale_attn_by_inverse_layer_idx": (None, False)},
    ),
    "qwen3next": Architecture(
        ("qwen3_next",), adds_one=True, normalizes=True, moves=moves.QWEN3_NEXT, keys=_STATE,
        needs=_EXPERTS_EVERYWHERE,
    ),
    "qwen35": Architecture(
        ("qwen3_5_text",), adds_one=True, moves=moves.QWEN35, keys=_STATE
    ),
    "qwen35moe": Architecture(
        ("qwen3_5_moe_text",), adds_one=True, normalizes=True, moves=moves.QWEN35, keys=_STATE,
        free=("feed_forward_length",),
    ),
    "minimax-m2": Architecture(("minimax_m2",), normalizes=True),
    "llama4": Architecture(
        ("llama4_text",), gating=SIGMOID, moves=moves.LLAMA4, free=("feed_forward_length",),
        needs={"attention_chunk_size": (None, 8192), "floor_scale": (None, 8192),
               "attn_scale": (None, 0.1), "attn_temperature_tuning": (None, 4, True)},
    ),
    "dots1": Architecture(("dots1",)),
    "exaone-moe": Architecture(("exaone_moe",)),
    "gptneox": Architecture(
        ("gpt_neox",), layer_norms=True, epsilon="layer_norm_eps", activations=("gelu",),
        moves=moves.GPT_NEOX, keys={"use_parallel_residual": (None, "use_parallel_residual")},
    ),
    "mpt": Architecture(
        ("mpt",), layer_norms=True, epsilon="layer_norm_epsilon", activations=(),
        free=("feed_forward_length",), keys={"attention.max_alibi_bias": (0, "alibi_bias_max")},
        needs={"alibi": (None, True), "qk_ln": (None, False), "softmax_scale": (None,)},
    ),
    "starcoder": Architecture(
        ("gpt_bigcode",), layer_norms=True, epsilon="layer_norm_epsilon", activations=_TANH,
        needs={"multi_query": (None, True), "scale_attn_weights": (None, True)},
    ),
    "granitehybrid": Architecture(
        ("granitemoehybrid",), interleaved=True, layered=True, normalizes=True,
        moves=moves.GRANITE, keys={**_MULTIPLIERS, **_STATE},
    ),
    "jamba": Architecture(("jamba",), layered=True, normalizes=False, keys=_STATE),
    "mamba": Architecture(
        ("mamba", "falcon_mamba"), epsilon="layer_norm_epsilon", keys=_STATE,
        free=_WITHOUT_ATTENTION,
    ),
    "mamba2": Architecture(
        ("mamba2",), epsilon="layer_norm_epsilon", keys=_STATE, free=_WITHOUT_ATTENTION
    ),
    "apertus": Architecture(("apertus",), activations=("xielu",)),
    "afmoe": Architecture(
        ("afmoe",), period=4, gating=SIGMOID, needs={"mup_enabled": (True,)}
    ),
    "nemotron_h": Architecture(
        ("nemotron_h",), interleaved=True, layer_norms=True, epsilon="layer_norm_epsilon",
        activations=(), layered=True, keys=_STATE, moves=moves.NEMOTRON_H,
        free=("feed_forward_length", "rope.dimension_count"),
        needs={"mlp_hidden_act": (None, "relu2")},
    ),
    "nemotron_h_moe": Architecture(
        ("nemotron_h",), interleaved=True, layer_norms=True, epsilon="layer_norm_epsilon",
        activations=(), layered=True, gating=SIGMOID, keys=_STATE, moves=moves.NEMOTRON_H,
        free=("feed_forward_length", "rope.dimension_count"),
        needs={"mlp_hidden_act": (None, "relu2")},
    ),
    "gemma4": Architecture(
        ("gemma4_text",), activations=_TANH, moves=moves.GEMMA4, free=("feed_forward_length",),
        keys={
            "attention.shared_kv_layers": (0, "num_kv_shared_layers"),
            "embedding_length_per_layer_input": (None, "hidden_size_per_layer_input"),
            "attention.key_length_swa": (None, "head_dim"),
            "attention.value_length_swa": (None, "head_dim"),
            "rope.dimension_count_swa": (None, "head_dim"),
            "final_logit_softcapping": (0, "final_logit_softcapping"),
        },
        needs={"enable_moe_block": (None, False)},
    ),
    "mistral3": Architecture(
        ("ministral3",), interleaved=True, needs={"sliding_window": (None,)}
    ),
    "exaone4": Architecture(("exaone4",), needs={"sliding_window": (None,)}),
    "jais2": Architecture(
        ("jais2",), layer_norms=True, epsilon="layer_norm_eps", activations=("relu2",)
    ),
    "phi2": Architecture(
        ("phi",), layer_norms=True, epsilon="layer_norm_eps", activations=_TANH
    ),
    "qwen2vl": Architecture(("qwen2_vl_text", "qwen2_5_vl_text")),
}  # fmt: skip

UNPROVED = {
    "qwen3vl": "llama.cpp's logits of a tiny file are 3e-3 away from those of transformers",
    "qwen3vlmoe": "the converter expects its experts in another layout than transformers writes",
    "mistral4": "its converter knows the wrapper alone, and its text is not tried",
    "kimi-linear": "its converter reads other names of tensors than transformers writes",
    "hunyuan-moe": "llama.cpp's logits of a tiny file are those of another model",
    "hunyuan_vl": "it is the text of a wrapper that is not tried",
    "falcon-h1": "its multipliers are folded into the weights of a file",
    "chatglm": "its converter writes another epsilon than transformers has for GLM",
    "bitnet": "its converter has no name for the head that transformers writes",
    "gemma3n": "its blocks share more than hidden states, which is not tested with files",
    "glm-dsa": "its blocks share more than hidden states, which is not tested with files",
    "mimo2": "its converter needs keys that transformers does not write",
    "minicpm3": "its scales are constants of llama.cpp, which are not compared",
    "phimoe": "its converter needs factors of rotations for long texts, which are not read",
    "paddleocr": "it is the text of a wrapper that is not tried",
    "deepseek2-ocr": "it is the text of a wrapper that is not tried",
    "gptj": "llama.cpp has its name and no graph",
    "chameleon": "it is the text of a wrapper that is not tried",
    "t5": "it has an encoder",
    "t5encoder": "it is an encoder",
}
"""Architectures of models that transformers has too, and why their files are not read."""
