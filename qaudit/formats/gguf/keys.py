"""Metadata of a GGUF file that llama.cpp computes by, held against the configuration of the base.

What llama.cpp reads for every architecture is in `load_hparams` of its `src/llama-model.cpp`, for
one alone in `load_arch_hparams` of `src/models/*.cpp` (b11549). A key of the architecture that is
not listed here is refused, because a version of llama.cpp may obey it. A key that is not in the
file has llama.cpp's default. Floats are float32 in a file, so they are compared as such.

Given up: llama.cpp runs a Mistral with full attention, whatever the window in its configuration.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qaudit.formats.gguf.architectures import ARCHITECTURES, SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN
from qaudit.formats.gguf.configuration import Values
from qaudit.formats.gguf.header import GgufHeader
from qaudit.formats.gguf.positions import (
    LISTS,
    every,
    linear_attention_keys,
    scaling_keys,
    section_keys,
    slides,
    window_keys,
)

UNKNOWN = "a file without it"
_NO_ARITHMETIC = (
    "context_length", "vocab_size", "tensor_data_layout", "rope.scaling.finetuned",
)  # fmt: skip
_ROTATED = 4  # of SmolLM3: the last of so many layers is not rotated
_LAYER_NORM_EPSILON = 1e-5  # of OLMo and DBRX, which have it in their code
_EPSILON = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
_SIZES = (
    "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count",
    "leading_dense_block_count", "interleave_moe_layer_step", "attention.q_lora_rank",
    "attention.kv_lora_rank", "attention.value_length_mla", "ssm.inner_size", "ssm.conv_kernel",
    "ssm.time_step_rank", "shortconv.l_cache", "moe_latent_size", "nextn_predict_layers",
)  # fmt: skip
"""What llama.cpp holds against the tensors; it loads no file that has other ones."""

_SIGMOID = (
    "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "lfm2_moe", "llama4_text",
    "minimax_m2", "youtu", "afmoe", "nemotron_h",
)  # fmt: skip
"""Types whose routers are sigmoids; no configuration of transformers has it."""
_WITH_NORM_KEY = ("afmoe", "deepseek2", "dots1", "exaone-moe", "glm4moe", "nemotron_h_moe")

_NONE: Mapping[str, Sequence[object]] = {
    "attention.scale": (0,), "attention.causal": (True,), "expert_count": (0,),
    "expert_used_count": (0,), "pooling_type": (0,), "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
}  # fmt: skip
"""Keys that no base of these architectures has a value for, and what changes nothing."""


def differences(header: GgufHeader, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key by which llama.cpp computes otherwise than the base: its value and theirs."""
    start = f"{header.architecture}."
    stored = {k.removeprefix(start): v for k, v in header.metadata.items() if k.startswith(start)}
    wanted = _wanted(header.architecture, stored, config)
    for key, (absent, *accepted) in wanted.items():
        value = stored.get(key, absent)
        of_layers = isinstance(value, list) and key not in LISTS and value not in accepted
        values = value if of_layers else [value]
        if not values or not all(any(_equal(v, option) for option in accepted) for v in values):
            yield key, "not there" if value is None else value, accepted[0]
    yield from _in_code(header.architecture, config)
    for key in sorted(set(stored) - set(wanted) - set(_NO_ARITHMETIC)):
        yield key, stored[key], UNKNOWN


def _in_code(architecture: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what llama.cpp has in its code, and the base has otherwise."""
    get = Values(config)
    code = ARCHITECTURES[architecture]
    act = get("hidden_activation", "hidden_act", "activation", "activation_function") or "silu"
    if code.activations and act not in code.activations:
        yield "hidden_act", code.activations[0], act
    normalizes = get("norm_topk_prob")
    if get.experts and None not in (normalizes, code.normalizes) and normalizes != code.normalizes:
        yield "norm_topk_prob", code.normalizes, normalizes
    for name, values in code.needs.items():
        if get(name) not in values:
            yield name, values[-1], get(name)
    if code.period:
        yield from _of_windows(architecture, get)
    if architecture == "smollm3":
        period = get("no_rope_layer_interval") or _ROTATED
        rotated, usual = (every(length, get.layers) for length in (period, _ROTATED))
        if (get("no_rope_layers") or [*map(int, rotated)]) != [*map(int, usual)]:
            stated = get("no_rope_layers") or f"each {period}th"
            yield "no_rope_layers", f"each {_ROTATED}th", stated


_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Blocks of the size whose attention is scaled by hidden size over heads (27B)."""


def _of_windows(architecture: str, get: Values) -> Iterator[tuple[str, Any, Any]]:
    """Yield what llama.cpp has in its code: windows by layer, and Gemma's scales of attention."""
    layers, period = get.layers, ARCHITECTURES[architecture].period
    if slides(get, layers, period) != every(period, layers):
        yield "layer_types", f"full attention in each {period}th", "another order"
    if architecture not in _LARGEST:
        return
    heads, hidden = get("num_attention_heads") or 1, get("hidden_size") or 0
    largest = layers == _LARGEST[architecture]
    scale = hidden / heads if largest else get("head_dim")
    if get("query_pre_attn_scalar") != scale:
        yield "query_pre_attn_scalar", scale, get("query_pre_attn_scalar")
    if get("use_bidirectional_attention"):
        yield "use_bidirectional_attention", False, True


def _of_experts(
    architecture: str, stored: Mapping[str, Any], get: Values
) -> dict[str, tuple[Any, ...]]:
    """Return the keys of architectures that have experts."""
    if not get.experts:
        return {}
    code = ARCHITECTURES[architecture]
    scale = get("routed_scaling_factor", "route_scale") or 1.0
    norm = "expert_weights_norm"
    gating = SIGMOID if get.type in _SIGMOID else SOFTMAX
    gating = code.gating if code.gating == SOFTMAX_OF_CHOSEN else gating
    wanted: dict[str, tuple[Any, ...]] = {
        "expert_count": (0, get.experts),
        "expert_used_count": (0, get.chosen_experts),
        "expert_weights_scale": (0, scale, *((0, 0.0) if scale == 1 else ())),
        "expert_gating_func": (code.gating, gating),
        norm: (stored.get(norm), stored.get(norm)),
    }
    if code.normalizes is None and architecture in _WITH_NORM_KEY:
        wanted[norm] = (False, get.type == "afmoe" or bool(get("norm_topk_prob")))
    for key, name in (("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group")):
        groups = get(name) or 0
        wanted[key] = (0, groups, *((0, 1) if groups < 2 else ()))
    return wanted


_WIDE_HEAD = 512  # of Gemma 4, in layers without a window, where a configuration has none


def _of_gemma(architecture: str, get: Values) -> dict[str, tuple[Any, ...]]:
    wanted: dict[str, tuple[Any, ...]] = {}
    if architecture == "gemma2":
        wanted["attn_logit_softcapping"] = (50.0, get("attn_logit_softcapping"))
        wanted["final_logit_softcapping"] = (30.0, get("final_logit_softcapping"))
    if architecture == "gemma3":
        wanted["final_logit_softcapping"] = (0, get("final_logit_softcapping") or 0)
    if architecture in ("gemma3", "gemma4"):
        wanted["rope.freq_base_swa"] = (10000.0, get.local_theta)
    if architecture == "gemma4":
        wide = get("global_head_dim") or get.of_full_attention("head_dim") or _WIDE_HEAD
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            wanted[key] = (None, wide)
        few = get("num_global_key_value_heads") or get.of_full_attention("num_key_value_heads")
        shared = (number for number in (get.shared_heads, few) if number)
        wanted["attention.head_count_kv"] = (None, *shared)
    return wanted


def _of_one(
    architecture: str, stored: Mapping[str, Any], get: Values
) -> dict[str, tuple[Any, ...]]:
    """Return keys that single architectures read."""
    wanted: dict[str, tuple[Any, ...]] = {
        key: (absent, get(*names) if get(*names) is not None else absent)
        for key, (absent, *names) in ARCHITECTURES[architecture].keys.items()
    }
    wanted |= _of_gemma(architecture, get)
    if architecture == "stablelm":
        wanted["use_parallel_residual"] = (bool(get("use_parallel_residual")),) * 2
    if architecture == "mistral3":
        wanted["attention.temperature_scale"] = (0, get.rope("llama_4_scaling_beta") or 0)
    if architecture in ("granite", "granitehybrid"):  # the key switches rotations
        rotates = architecture != "granitehybrid" or get("position_embedding_type") == "rope"
        wanted["rope.scaling.finetuned"] = (True, rotates)
    if architecture == "mamba":
        wanted["ssm.dt_b_c_rms"] = (False, get.type == "falcon_mamba")
    if architecture.startswith("qwen3") and get("linear_num_key_heads"):
        wanted |= linear_attention_keys(stored, get)
    if get("kv_lora_rank") and architecture != "minicpm3":
        length = get("qk_nope_head_dim") + get("qk_rope_head_dim")
        wanted["attention.key_length_mla"] = (None, length)
        wanted["rope.dimension_count"] = (None, get("qk_rope_head_dim"))
    return wanted


def _wanted(
    architecture: str, stored: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Return, by key, what llama.cpp takes where there is none, and what computes as the base."""
    get, code = Values(config), ARCHITECTURES[architecture]
    heads, hidden = get.heads, get.hidden
    head = get("head_dim") or (hidden // heads if heads and hidden else None)
    theta = get.rope("rope_theta")
    usual = hidden // heads if heads and hidden else None
    wanted: dict[str, tuple[Any, ...]] = {
        "block_count": (None, get.layers + int(stored.get("nextn_predict_layers") or 0)),
        "embedding_length": (None, hidden),
        "feed_forward_length": (None, get.feed_forward),
        "attention.head_count": (None, heads),
        "attention.head_count_kv": (heads, get.shared_heads),
        "attention.key_length": (usual, head),
        "attention.value_length": (usual, head),
        "rope.dimension_count": (
            stored.get("attention.key_length", usual),
            get("rotary_dim") or (int(head * get.rotated) if head else None),
        ),
        "attention.clamp_kqv": (0, get("clip_qkv") or 0),
        "rope.freq_base": (10000.0, theta),
        "rope.freq_base_swa": (stored.get("rope.freq_base", 10000.0), theta),
        **{key: (accepted[0], *accepted) for key, accepted in _NONE.items()},
        **scaling_keys(stored, get),
        **window_keys(architecture, stored, get),
        **section_keys(architecture, get),
        **{key: (stored.get(key), stored.get(key)) for key in (*_SIZES, *code.free)},
        **_of_experts(architecture, stored, get),
        **_of_one(architecture, stored, get),
    }
    if code.layered:  # blocks without attention have no heads
        for key in ("attention.head_count", "attention.head_count_kv"):
            wanted[key] = (*wanted[key], 0)
    of_layers, of_rms = _EPSILON
    if code.layer_norms:
        wanted[of_layers] = (None, get(code.epsilon) if code.epsilon else _LAYER_NORM_EPSILON)
        usual = get(code.epsilon) if code.layered else stored.get(of_rms)
        wanted[of_rms] = (usual, usual)  # read of Nemotron-H alone
    else:
        wanted[of_rms] = (None, get(code.epsilon))
        wanted[of_layers] = (stored.get(of_layers), stored.get(of_layers))
    return wanted


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(value, float) or isinstance(wanted, float):
        numbers = all(type(side) in (int, float) for side in (value, wanted))
        return numbers and _narrow(value) == _narrow(wanted)
    return type(value) is type(wanted) and bool(value == wanted)


def _narrow(number: float) -> float:
    """Return a number as float32 holds it."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        return math.nan
