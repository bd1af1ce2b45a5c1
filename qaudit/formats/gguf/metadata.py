"""Metadata of a GGUF file that llama.cpp computes by, held against the configuration of the base.

What llama.cpp reads for every architecture is in `load_hparams` of its `src/llama-model.cpp`, for
one alone in `load_arch_hparams` of `src/models/*.cpp` (b11549). A key of the architecture that is
not listed here is refused, because a version of llama.cpp may obey it. A key that is not in the
file has llama.cpp's default. Floats are float32 in a file, so they are compared as such.

The converter knows many names for one value of a configuration, and `config.json` may leave out
what transformers has by default. `defaults.json` has these by model type, of the names that are
read here; `python -m tests.support.gguf_defaults` writes it.

Given up: llama.cpp runs a Mistral with full attention, whatever the window in its configuration.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from qaudit.formats.gguf.architectures import ARCHITECTURES, SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN
from qaudit.formats.gguf.header import GgufHeader

Table = Mapping[str, Any]
Wanted = dict[str, tuple[Any, ...]]
"""By key, what llama.cpp takes where there is none, and what computes as the base."""

UNKNOWN = "a file without it"
_NO_ARITHMETIC = "context_length", "vocab_size", "tensor_data_layout", "rope.scaling.finetuned"
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
_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Blocks of the size whose attention is scaled by hidden size over heads (27B)."""
_WITH_NORM_KEY = ("afmoe", "deepseek2", "dots1", "exaone-moe", "glm4moe", "nemotron_h_moe")

_NONE: Mapping[str, Sequence[object]] = {
    "attention.scale": (0,), "attention.causal": (True,), "expert_count": (0,),
    "expert_used_count": (0,), "pooling_type": (0,), "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
}  # fmt: skip
"""Keys that no base of these architectures has a value for, and what changes nothing."""
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_RECURRENT, _SECTIONS = "attention.recurrent_layers", "rope.dimension_sections"
_LISTS = (_PATTERN, _RECURRENT, _SECTIONS)
"""Keys whose lists have one value, not one for each layer."""
_USUAL_SECTIONS = {
    "qwen35": (11, 11, 10), "qwen35moe": (11, 11, 10), "qwen2vl": (16, 24, 24),
}  # fmt: skip
_WITH_WINDOW = ("olmo2", "exaone-moe", "gemma4")
"""Architectures whose windows llama.cpp runs by layer, as a file says."""
_USUAL: Table = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
_PARTS = ("attn_config", "ffn_config")  # of DBRX


def differences(header: GgufHeader, config: Table) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key by which llama.cpp computes otherwise than the base: its value and theirs."""
    start = f"{header.architecture}."
    stored = {k.removeprefix(start): v for k, v in header.metadata.items() if k.startswith(start)}
    further = stored.get("nextn_predict_layers")
    if type(further) is not int or not 0 <= further < 100:  # which no file has that is whole
        stored.pop("nextn_predict_layers", None)
    wanted = _wanted(header.architecture, stored, config)
    for key, (absent, *accepted) in wanted.items():
        value = stored.get(key, absent)
        of_layers = isinstance(value, list) and key not in _LISTS and value not in accepted
        values = value if of_layers else [value]
        if not values or not all(any(_equal(v, option) for option in accepted) for v in values):
            yield key, "not there" if value is None else value, accepted[0]
    yield from _in_code(header.architecture, config)
    for key in sorted(set(stored) - set(wanted) - set(_NO_ARITHMETIC)):
        yield key, stored[key], UNKNOWN


def _in_code(architecture: str, config: Table) -> Iterator[tuple[str, Any, Any]]:
    """Yield what llama.cpp has in its code, and the base has otherwise."""
    get = _Values(config)
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
    layers, period = get.layers, code.period
    if period and _slides(get, layers, period) != _every(period, layers):
        yield "layer_types", f"full attention in each {period}th", "another order"
    if architecture in _LARGEST:  # windows by layer, and scales of attention
        heads, hidden = get("num_attention_heads") or 1, get("hidden_size") or 0
        scale = hidden / heads if layers == _LARGEST[architecture] else get("head_dim")
        if get("query_pre_attn_scalar") != scale:
            yield "query_pre_attn_scalar", scale, get("query_pre_attn_scalar")
        if get("use_bidirectional_attention"):
            yield "use_bidirectional_attention", False, True
    if architecture == "smollm3":
        period = get("no_rope_layer_interval") or _ROTATED
        rotated, usual = (_every(length, get.layers) for length in (period, _ROTATED))
        if (get("no_rope_layers") or [*map(int, rotated)]) != [*map(int, usual)]:
            stated = get("no_rope_layers") or f"each {period}th"
            yield "no_rope_layers", f"each {_ROTATED}th", stated


def _of_experts(architecture: str, stored: Table, get: _Values) -> Wanted:
    """Return the keys of architectures that have experts."""
    if not get.experts:
        return {}
    code = ARCHITECTURES[architecture]
    scale = get("routed_scaling_factor", "route_scale") or 1.0
    norm = "expert_weights_norm"
    gating = SIGMOID if get.type in _SIGMOID else SOFTMAX
    gating = code.gating if code.gating == SOFTMAX_OF_CHOSEN else gating
    wanted: Wanted = {
        "expert_count": (0, get.experts),
        "expert_used_count": (0, get("num_experts_per_tok", "moe_k", "moe_top_k") or 0),
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


def _of_one(architecture: str, stored: Table, get: _Values) -> Wanted:
    """Return keys that single architectures read."""
    wanted: Wanted = {
        key: (absent, absent if (value := get(*names)) is None else value)
        for key, (absent, *names) in ARCHITECTURES[architecture].keys.items()
    }
    if architecture == "gemma2":
        wanted["attn_logit_softcapping"] = (50.0, get("attn_logit_softcapping"))
        wanted["final_logit_softcapping"] = (30.0, get("final_logit_softcapping"))
    if architecture in ("gemma3", "gemma4"):
        table = get("rope_parameters")
        local = table.get("sliding_attention") if isinstance(table, Mapping) else None
        theta = local.get("rope_theta") if isinstance(local, Mapping) else None
        wanted["rope.freq_base_swa"] = (10000.0, theta or get("rope_local_base_freq"))
    if architecture == "gemma4":
        wide = get("global_head_dim") or get.of_full_attention("head_dim") or _WIDE_HEAD
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            wanted[key] = (None, wide)
        few = get("num_global_key_value_heads") or get.of_full_attention("num_key_value_heads")
        shared = (number for number in (get.shared_heads, few) if number)
        wanted["attention.head_count_kv"] = (None, *shared)
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
        linear = [kind == "linear_attention" for kind in get("layer_types") or ()]
        linear = linear or _every(int(get("full_attention_interval") or 4), get.layers)
        dense = [False] * stored.get("nextn_predict_layers", 0)
        interval = stored.get("full_attention_interval", 4)
        by_interval = _every(interval, get.layers) if isinstance(interval, int) else None
        recurrent = [*linear, *dense] if _RECURRENT in stored else linear
        wanted[_RECURRENT] = (by_interval, recurrent)
        wanted["full_attention_interval"] = (interval, interval)
    if get("kv_lora_rank") and architecture != "minicpm3":
        length = get("qk_nope_head_dim") + get("qk_rope_head_dim")
        wanted["attention.key_length_mla"] = (None, length)
        wanted["rope.dimension_count"] = (None, get("qk_rope_head_dim"))
    return wanted


def _wanted(architecture: str, stored: Table, config: Table) -> Wanted:
    get, code = _Values(config), ARCHITECTURES[architecture]
    heads, hidden = get.heads, get.whole("hidden_size", "n_embd", "d_model")
    width = get.whole("intermediate_size", "ffn_hidden_size", "n_inner")
    head = get("head_dim") or (hidden // heads if heads and hidden else None)
    theta = get.rope("rope_theta")
    usual = hidden // heads if heads and hidden else None
    wanted: Wanted = {
        "block_count": (None, get.layers + stored.get("nextn_predict_layers", 0)),
        "embedding_length": (None, hidden),
        "feed_forward_length": (None, width or (4 * hidden if hidden else None)),
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
        **_scaling_keys(stored, get),
        **_window_keys(architecture, stored, get),
        **{key: (stored.get(key), stored.get(key)) for key in (*_SIZES, *code.free)},
        **_of_experts(architecture, stored, get),
        **_of_one(architecture, stored, get),
    }
    if sections := _USUAL_SECTIONS.get(architecture):  # of text they are the same but for the last
        wanted[_SECTIONS] = (None, [*(get.rope("mrope_section") or sections), 0])
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
    """Compare floats as float32 holds them, and anything else exactly."""
    if not isinstance(value, float) and not isinstance(wanted, float):
        return type(value) is type(wanted) and bool(value == wanted)
    if not all(type(side) in (int, float) for side in (value, wanted)):
        return False
    try:
        narrow = [struct.unpack("<f", struct.pack("<f", side))[0] for side in (value, wanted)]
    except OverflowError:
        return False
    return bool(narrow[0] == narrow[1])


# ------------------------------------------------------- where layers attend, what they rotate


def _scaling_keys(stored: Table, get: _Values) -> Wanted:
    kind = str(get.rope("rope_type") or get.rope("type") or "default")
    factor = get.rope("factor") if kind in ("linear", "yarn") else None
    key, yarn = "rope.scaling.", kind == "yarn"
    usual_type: tuple[str, ...] = ("linear", "linear", "none")
    if kind not in ("default", "linear", "yarn", "llama3", "dynamic", "proportional"):
        usual_type = ("linear", kind)
    original, context = f"{key}original_context_length", stored.get("context_length")
    trained = get.rope("original_max_position_embeddings") or get("max_position_embeddings")
    log = get.rope("mscale_all_dim") if yarn else None  # of DeepSeek
    share = 1 if get.type == "ministral3" else 0.1
    scaling: Wanted = {
        f"{key}type": ("linear", "yarn") if yarn else usual_type,
        f"{key}factor": (stored.get("rope.scale_linear", 0), *((factor,) if factor else (0, 1))),
        "rope.scale_linear": (0, stored.get("rope.scale_linear", 0)),  # an older name
        f"{key}yarn_ext_factor": (-1, *((-1, 1) if yarn else (-1, 0))),
        original: (context, trained if yarn else stored.get(original, context)),
        f"{key}yarn_log_multiplier": (0, share * log if log else 0),
    }
    for name, usual in (("fast", 32), ("slow", 1)):
        beta = f"{key}yarn_beta_{name}"
        needed = (get.rope(f"beta_{name}") or usual) if yarn else stored.get(beta, usual)
        scaling[beta] = (usual, needed)
    attention = get.rope("attention_factor")
    scaled = 1 + 0.1 * math.log(factor) if yarn and factor else 1
    if attention is not None and not math.isclose(attention, scaled, rel_tol=1e-6):
        scaling[f"{key}attn_factor"] = (1, f"scaled by {attention:g}")
    return scaling


def _window_keys(architecture: str, stored: Table, get: _Values) -> Wanted:
    window = get("sliding_window") or 0
    if get("use_sliding_window") is False:
        window = 0
    layers = get.layers
    if alternates := ARCHITECTURES[architecture].period:
        listed = isinstance(stored.get(_PATTERN), list)
        fixed = _every(alternates, layers) if listed else alternates
        usual = 4096 if architecture == "gemma2" else 0
        return {_WINDOW: (usual, window), _PATTERN: (fixed, fixed)}
    if architecture not in _WITH_WINDOW:
        return {_WINDOW: (window, window)}
    if not window and not stored.get(_WINDOW):
        return {_WINDOW: (0, 0), _PATTERN: (None, stored.get(_PATTERN))}
    sliding = _slides(get, layers, 4)
    pattern: tuple[Any, ...] = (_every(4, layers), sliding)
    if isinstance(period := stored.get(_PATTERN), int):
        pattern = (period, period if _every(period, layers) == sliding else sliding)
    return {_WINDOW: (0, window), _PATTERN: pattern}


def _slides(get: _Values, layers: int, period: int) -> list[bool]:
    """Return which layers of a base have a window."""
    kinds = get("layer_types") or ()
    period = int(get("sliding_window_pattern", "_sliding_window_pattern") or period)
    return [kind == "sliding_attention" for kind in kinds] or _every(period, layers)


def _every(period: int, layers: int) -> list[bool]:
    """Return which layers have a window where the last of each period has none."""
    return [period < 1 or k % period < period - 1 for k in range(layers)]


def rope_factors(config: Table, pairs: int) -> list[float] | None:
    """Return llama.cpp's divisors of frequencies (`rope_freqs.weight`); None without any."""
    get = _Values(config)
    kind = get.rope("rope_type") or get.rope("type")
    if kind == "proportional":  # of Gemma 4: the others are not rotated
        rotated = int(pairs * (get.rope("partial_rotary_factor") or 1))
        return [1.0] * rotated + [1e30] * (pairs - rotated)
    if kind != "llama3":
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


# ----------------------------------------------------------- a configuration as it is converted


@cache
def _defaults() -> Any:
    """Return what transformers takes where a configuration has none, by model type."""
    return json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8"))


class _Values:
    """A configuration with the defaults of its model type, and its rotations in either form."""

    def __init__(self, config: Table) -> None:
        self.type = str(config.get("model_type"))
        written = {key: value for key, value in config.items() if value is not None}
        for part in _PARTS:
            inner = config.get(part)
            written |= inner if isinstance(inner, Mapping) else {}
        usual = {**_USUAL, **_defaults().get(self.type, {})}
        self._written = written  # `null` is no default, but nothing
        self._default = {name: value for name, value in usual.items() if name not in config}
        ropes = (written.get(key) for key in ("rope_parameters", "rope_scaling"))
        tables = [*ropes, written, self._default]
        if isinstance(tables[0], Mapping):  # of OLMo 3, by the kind of layer
            tables.insert(0, tables[0].get("full_attention"))
        self._rope = [table for table in tables if isinstance(table, Mapping)]

    def __call__(self, *names: str) -> Any:
        """Return the value of the first name that has one."""
        both = (self._written, self._default)
        return next((t[name] for t in both for name in names if t.get(name) is not None), None)

    def rope(self, key: str) -> Any:
        return next((t[key] for t in self._rope if t.get(key) is not None), None)

    @property
    def rotated(self) -> float:
        """The share of a head's columns that are rotated."""
        return float(self.rope("partial_rotary_factor") or self("rotary_pct") or 1)

    @property
    def layers(self) -> int:
        kinds = self("hybrid_override_pattern", "layers_block_type") or ()  # of Nemotron-H
        return int(self("num_hidden_layers", "n_layer", "n_layers") or len(kinds))

    @property
    def heads(self) -> int | None:
        return self.whole("num_attention_heads", "n_head", "n_heads")

    @property
    def shared_heads(self) -> int | None:
        """The heads of keys and values."""
        if self.type == "gpt_bigcode" and self("multi_query"):
            return 1
        if self.type == "falcon" and not self("new_decoder_architecture"):
            return 1 if self("multi_query") else self.heads
        return self.whole("num_key_value_heads", "num_kv_heads", "kv_n_heads") or self.heads

    def of_full_attention(self, name: str) -> int | None:
        """Return what layers without a window have otherwise (Gemma 4)."""
        layers = self("per_layer_config")
        tables = layers.values() if isinstance(layers, Mapping) else ()
        values = (table.get(name) for table in tables if isinstance(table, Mapping))
        return next((value for value in values if isinstance(value, int)), None)

    @property
    def experts(self) -> int:
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        return int(self(*names) or 0)

    def whole(self, *names: str) -> int | None:
        value = self(*names)
        return value if isinstance(value, int) and not isinstance(value, bool) else None
