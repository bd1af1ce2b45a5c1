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

from qaudit.formats.gguf.architectures import ARCHITECTURES
from qaudit.formats.gguf.header import GgufHeader

UNKNOWN = "a file without it"
_NO_ARITHMETIC = (
    "context_length", "vocab_size", "tensor_data_layout", "rope.scaling.finetuned",
)  # fmt: skip
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_WITH_WINDOW = "olmo2"  # of those that are read, the one whose windows llama.cpp runs
_ROTATED = 4  # of SmolLM3: the last of so many layers is not rotated
_LAYER_NORM_EPSILON = 1e-5  # of OLMo, which has it in its code
_EPSILON = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
_OF_TYPE: Mapping[str, Mapping[str, Any]] = {
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"use_sliding_window": False, "num_key_value_heads": 32},
    "qwen3": {"use_sliding_window": False, "num_key_value_heads": 32, "head_dim": 128},
    "smollm3": {"use_sliding_window": False, "num_key_value_heads": 4, "rope_theta": 2000000.0},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_key_value_heads": 8,
                "num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "olmoe": {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    "qwen2_moe": {"use_sliding_window": False, "num_experts": 60, "num_experts_per_tok": 4},
    "qwen3_moe": {"use_sliding_window": False, "num_key_value_heads": 4, "num_experts": 128,
                  "num_experts_per_tok": 8},
    "gemma": {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "num_key_value_heads": 4,
               "query_pre_attn_scalar": 256, "sliding_window": 4096,
               "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "num_key_value_heads": 4,
                    "num_attention_heads": 8,
                    "query_pre_attn_scalar": 256, "sliding_window": 4096,
                    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
    "phi3": {"rms_norm_eps": 1e-5},
    "starcoder2": {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh",
                   "num_key_value_heads": 2},
    "nemotron": {"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "stablelm": {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
                 "use_parallel_residual": False},
    "cohere": {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 500000.0},
    "cohere2": {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096},
    "granite": {"attention_multiplier": 1.0, "embedding_multiplier": 1.0,
                "residual_multiplier": 1.0, "logits_scaling": 1.0},
}  # fmt: skip
"""What transformers takes where `config.json` has none."""

_NONE: Mapping[str, Sequence[object]] = {
    "attention.scale": (0,), "attention.causal": (True,), "expert_count": (0,),
    "expert_used_count": (0,), "pooling_type": (0,), "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,), "rope.scaling.yarn_log_multiplier": (0,),
}  # fmt: skip
"""Keys that no base of these architectures has a value for, and what changes nothing."""


def differences(header: GgufHeader, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key by which llama.cpp computes otherwise than the base: its value and theirs."""
    start = f"{header.architecture}."
    stored = {k.removeprefix(start): v for k, v in header.metadata.items() if k.startswith(start)}
    wanted = _wanted(header.architecture, stored, config)
    for key, (absent, *accepted) in wanted.items():
        value = stored.get(key, absent)
        values = value if isinstance(value, list) and key != _PATTERN else [value]
        if not values or not all(any(_equal(v, option) for option in accepted) for v in values):
            yield key, "not there" if value is None else value, accepted[0]
    yield from _in_code(header.architecture, config)
    for key in sorted(set(stored) - set(wanted) - set(_NO_ARITHMETIC)):
        yield key, stored[key], UNKNOWN


def _in_code(architecture: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what llama.cpp has in its code, and the base has otherwise."""
    get = _Values(config)
    code = ARCHITECTURES[architecture]
    act = get("hidden_activation") or get("hidden_act") or "silu"
    if act not in code.activations:
        yield "hidden_act", code.activations[0], act
    if code.normalizes is not None and _experts(get):
        if (normalizes := bool(get("norm_topk_prob"))) != code.normalizes:
            yield "norm_topk_prob", code.normalizes, normalizes
        if get("mlp_only_layers") or (get("decoder_sparse_step") or 1) != 1:
            yield "mlp_only_layers", "experts in every layer", "some without"
    if code.period:
        yield from _of_windows(architecture, get)
    if architecture == "olmoe" and get("clip_qkv"):
        yield "attention.clamp_kqv", 0, get("clip_qkv")
    if architecture == "smollm3":
        layers = int(get("num_hidden_layers") or 0)
        every = get("no_rope_layer_interval") or _ROTATED
        rotated = [int(flag) for flag in _every(every, layers)]
        if (get("no_rope_layers") or rotated) != [int(flag) for flag in _every(_ROTATED, layers)]:
            yield "no_rope_layers", f"each {_ROTATED}th", get("no_rope_layers") or f"each {every}th"


_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Blocks of the size whose attention is scaled by hidden size over heads (27B)."""


def _of_windows(architecture: str, get: _Values) -> Iterator[tuple[str, Any, Any]]:
    """Yield what llama.cpp has in its code: windows by layer, and Gemma's scales of attention."""
    layers, period = int(get("num_hidden_layers") or 0), ARCHITECTURES[architecture].period
    if _slides(get, layers, period) != _every(period, layers):
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


def _experts(get: _Values) -> int:
    return int(get("num_local_experts") or get("num_experts") or 0)


def _of_one(
    architecture: str, stored: Mapping[str, Any], get: _Values
) -> dict[str, tuple[Any, ...]]:
    """Return keys that single architectures read."""
    wanted: dict[str, tuple[Any, ...]] = {}
    if ARCHITECTURES[architecture].normalizes is not None:
        wanted |= {
            "expert_count": (0, _experts(get)),
            "expert_used_count": (0, (get("num_experts_per_tok") if _experts(get) else 0) or 0),
        }
    if architecture in ("qwen2moe", "qwen3moe"):  # tensors have these lengths
        for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
            wanted[key] = (stored.get(key), stored.get(key))
    if architecture == "gemma2":
        wanted["attn_logit_softcapping"] = (50.0, get("attn_logit_softcapping"))
        wanted["final_logit_softcapping"] = (30.0, get("final_logit_softcapping"))
    if architecture == "gemma3":
        wanted["final_logit_softcapping"] = (0, get("final_logit_softcapping") or 0)
        wanted["rope.freq_base_swa"] = (10000.0, get.local_theta)
    if architecture == "granite":
        wanted["attention.scale"] = (0, get("attention_multiplier"))
        wanted["embedding_scale"] = (1.0, get("embedding_multiplier"))
        wanted["residual_scale"] = (1.0, get("residual_multiplier"))
        wanted["logit_scale"] = (None, get("logits_scaling"))
    if architecture in ("command-r", "cohere2"):
        wanted["logit_scale"] = (None, get("logit_scale"))
    if architecture == "stablelm":
        parallel = bool(get("use_parallel_residual"))
        wanted["use_parallel_residual"] = (parallel, parallel)
    return wanted


def _wanted(
    architecture: str, stored: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Return, by key, what llama.cpp takes where there is none, and what computes as the base."""
    get = _Values(config)
    heads, hidden = get("num_attention_heads"), get("hidden_size")
    head = get("head_dim") or (hidden // heads if heads and hidden else None)
    theta = get.rope("rope_theta")
    usual = hidden // heads if heads and hidden else None
    wanted: dict[str, tuple[Any, ...]] = {
        "block_count": (None, get("num_hidden_layers")),
        "embedding_length": (None, hidden),
        "feed_forward_length": (None, get("intermediate_size")),
        "attention.head_count": (None, heads),
        "attention.head_count_kv": (heads, get("num_key_value_heads") or heads),
        "attention.key_length": (usual, head),
        "attention.value_length": (usual, head),
        "rope.dimension_count": (
            stored.get("attention.key_length", usual),
            int(head * (get.rope("partial_rotary_factor") or 1)) if head else None,
        ),
        "attention.clamp_kqv": (0, get("clip_qkv") or 0),
        "rope.freq_base": (10000.0, theta),
        "rope.freq_base_swa": (stored.get("rope.freq_base", 10000.0), theta),
        **{key: (accepted[0], *accepted) for key, accepted in _NONE.items()},
        **_scaling(stored, get),
        **_window(architecture, stored, get),
        **_of_one(architecture, stored, get),
    }
    of_layers, of_rms = _EPSILON
    code = ARCHITECTURES[architecture]
    if code.layer_norms:
        wanted[of_layers] = (None, get(code.epsilon) if code.epsilon else _LAYER_NORM_EPSILON)
        wanted[of_rms] = (stored.get(of_rms), stored.get(of_rms))  # not read
    else:
        wanted[of_rms] = (None, get(code.epsilon))
        wanted[of_layers] = (stored.get(of_layers), stored.get(of_layers))
    return wanted


def _scaling(stored: Mapping[str, Any], get: _Values) -> dict[str, tuple[Any, ...]]:
    kind = str(get.rope("rope_type") or get.rope("type") or "default")
    factor = get.rope("factor") if kind in ("linear", "yarn") else None
    key = "rope.scaling."
    scaling: dict[str, tuple[Any, ...]] = {
        f"{key}type": ("linear", "yarn") if kind == "yarn" else ("linear", "linear", "none"),
        f"{key}factor": (stored.get("rope.scale_linear", 0), *((factor,) if factor else (0, 1))),
        "rope.scale_linear": (0, stored.get("rope.scale_linear", 0)),  # an older name
        f"{key}yarn_ext_factor": (-1, *((-1, 1) if kind == "yarn" else (-1, 0))),
    }
    yarn = kind == "yarn"
    for name, parameter, usual in (("fast", "beta_fast", 32), ("slow", "beta_slow", 1)):
        named = stored.get(f"{key}yarn_beta_{name}", usual)
        scaling[f"{key}yarn_beta_{name}"] = (
            usual,
            (get.rope(parameter) or usual) if yarn else named,
        )
    original, context = f"{key}original_context_length", stored.get("context_length")
    trained = get.rope("original_max_position_embeddings") or get("max_position_embeddings")
    scaling[original] = (context, trained if yarn else stored.get(original, context))
    attention = get.rope("attention_factor")
    scaled = 1 + 0.1 * math.log(factor) if yarn and factor else 1
    if attention is not None and not math.isclose(attention, scaled, rel_tol=1e-6):
        scaling[f"{key}attn_factor"] = (1, f"scaled by {attention:g}")
    if kind not in ("default", "linear", "yarn", "llama3", "dynamic"):
        scaling[f"{key}type"] = ("linear", kind)
    return scaling


def _window(
    architecture: str, stored: Mapping[str, Any], get: _Values
) -> dict[str, tuple[Any, ...]]:
    window = get("sliding_window") or 0
    if get("use_sliding_window") is False:
        window = 0
    if alternates := ARCHITECTURES[architecture].period:
        layers = int(get("num_hidden_layers") or 0)
        listed = isinstance(stored.get(_PATTERN), list)
        fixed = _every(alternates, layers) if listed else alternates
        usual = 4096 if architecture == "gemma2" else 0
        return {_WINDOW: (usual, window), _PATTERN: (fixed, fixed)}
    if architecture != _WITH_WINDOW:
        return {_WINDOW: (window, window)}
    if not window and not stored.get(_WINDOW):
        return {_WINDOW: (0, 0), _PATTERN: (None, stored.get(_PATTERN))}
    layers = int(get("num_hidden_layers") or 0)
    slides = _slides(get, layers, 4)
    wanted: dict[str, tuple[Any, ...]] = {
        _WINDOW: (0, window),
        _PATTERN: (_every(4, layers), slides),
    }
    if isinstance(period := stored.get(_PATTERN), int):
        accepted = period if _every(period, layers) == slides else slides
        wanted[_PATTERN] = (period, accepted)
    return wanted


def _slides(get: _Values, layers: int, period: int) -> list[bool]:
    """Return which layers of a base have a window."""
    kinds = get("layer_types") or ()
    every = int(get("sliding_window_pattern") or get("_sliding_window_pattern") or period)
    return [kind == "sliding_attention" for kind in kinds] or _every(every, layers)


def _every(period: int, layers: int) -> list[bool]:
    """Return which layers have a window where the last of each period has none."""
    return [period < 1 or k % period < period - 1 for k in range(layers)]


class _Values:
    """A configuration with the defaults of its model type, and its rotations in either form."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = {**_DEFAULTS, **_OF_TYPE.get(str(config.get("model_type")), {}), **config}
        tables = [config.get("rope_parameters"), config.get("rope_scaling"), self._config]
        if isinstance(tables[0], Mapping):  # of OLMo 3, by the kind of layer
            tables.insert(0, tables[0].get("full_attention"))
        self._rope = [table for table in tables if isinstance(table, Mapping)]

    def __call__(self, key: str) -> Any:
        return self._config.get(key)

    @property
    def local_theta(self) -> Any:
        """The base of rotations in layers with a window (Gemma 3)."""
        table = self._config.get("rope_parameters")
        local = table.get("sliding_attention") if isinstance(table, Mapping) else None
        named = local.get("rope_theta") if isinstance(local, Mapping) else None
        return named or self._config.get("rope_local_base_freq")

    def rope(self, key: str) -> Any:
        return next((t[key] for t in self._rope if t.get(key) is not None), None)


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


def rope_factors(config: Mapping[str, Any], pairs: int) -> list[float] | None:
    """Return llama.cpp's divisors of frequencies (`rope_freqs.weight`); None without any."""
    get = _Values(config)
    if (get.rope("rope_type") or get.rope("type")) != "llama3":
        return None
    theta, factor = get.rope("rope_theta"), get.rope("factor")
    low, high = get.rope("low_freq_factor"), get.rope("high_freq_factor")
    trained = get.rope("original_max_position_embeddings")
    factors = []
    for k in range(pairs):
        turns = trained * theta ** (-k / pairs) / (2 * math.pi)  # within the trained context
        smooth = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
