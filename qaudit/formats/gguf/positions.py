"""Keys of a GGUF file that say where a layer attends and what it rotates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qaudit.formats.gguf.architectures import ARCHITECTURES
from qaudit.formats.gguf.configuration import Values

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
RECURRENT, SECTIONS = "attention.recurrent_layers", "rope.dimension_sections"
LISTS = (PATTERN, RECURRENT, SECTIONS)
"""Keys whose lists have one value, not one for each layer."""
_SECTIONS = {
    "qwen35": (11, 11, 10), "qwen35moe": (11, 11, 10), "qwen2vl": (16, 24, 24),
}  # fmt: skip
_WITH_WINDOW = ("olmo2", "exaone-moe", "gemma4")
"""Architectures whose windows llama.cpp runs by layer, as a file says."""


def scaling_keys(stored: Mapping[str, Any], get: Values) -> dict[str, tuple[Any, ...]]:
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
    log = get.rope("mscale_all_dim") if yarn else None  # of DeepSeek
    share = 1 if get.type == "ministral3" else 0.1
    scaling[f"{key}yarn_log_multiplier"] = (0, share * log if log else 0)
    attention = get.rope("attention_factor")
    scaled = 1 + 0.1 * math.log(factor) if yarn and factor else 1
    if attention is not None and not math.isclose(attention, scaled, rel_tol=1e-6):
        scaling[f"{key}attn_factor"] = (1, f"scaled by {attention:g}")
    if kind not in ("default", "linear", "yarn", "llama3", "dynamic", "proportional"):
        scaling[f"{key}type"] = ("linear", kind)
    return scaling


def window_keys(
    architecture: str, stored: Mapping[str, Any], get: Values
) -> dict[str, tuple[Any, ...]]:
    window = get("sliding_window") or 0
    if get("use_sliding_window") is False:
        window = 0
    if alternates := ARCHITECTURES[architecture].period:
        layers = get.layers
        listed = isinstance(stored.get(PATTERN), list)
        fixed = every(alternates, layers) if listed else alternates
        usual = 4096 if architecture == "gemma2" else 0
        return {WINDOW: (usual, window), PATTERN: (fixed, fixed)}
    if architecture not in _WITH_WINDOW:
        return {WINDOW: (window, window)}
    if not window and not stored.get(WINDOW):
        return {WINDOW: (0, 0), PATTERN: (None, stored.get(PATTERN))}
    layers = get.layers
    sliding = slides(get, layers, 4)
    wanted: dict[str, tuple[Any, ...]] = {WINDOW: (0, window), PATTERN: (every(4, layers), sliding)}
    if isinstance(period := stored.get(PATTERN), int):
        accepted = period if every(period, layers) == sliding else sliding
        wanted[PATTERN] = (period, accepted)
    return wanted


def slides(get: Values, layers: int, period: int) -> list[bool]:
    """Return which layers of a base have a window."""
    kinds = get("layer_types") or ()
    period = int(get("sliding_window_pattern", "_sliding_window_pattern") or period)
    return [kind == "sliding_attention" for kind in kinds] or every(period, layers)


def every(period: int, layers: int) -> list[bool]:
    """Return which layers have a window where the last of each period has none."""
    return [period < 1 or k % period < period - 1 for k in range(layers)]


def section_keys(architecture: str, get: Values) -> dict[str, tuple[Any, ...]]:
    """Return sections of rotations: positions of text are the same in all but the last."""
    usual = _SECTIONS.get(architecture)
    sections = get.rope("mrope_section") or usual
    return {SECTIONS: (None, [*sections, 0])} if usual and sections else {}


def linear_attention_keys(stored: Mapping[str, Any], get: Values) -> dict[str, tuple[Any, ...]]:
    """Return which blocks are recurrent."""
    kinds = get("layer_types") or ()
    linear = [kind == "linear_attention" for kind in kinds]
    linear = linear or every(int(get("full_attention_interval") or 4), get.layers)
    dense = [False] * int(stored.get("nextn_predict_layers") or 0)
    interval = stored.get("full_attention_interval", 4)
    by_interval = every(interval, get.layers) if isinstance(interval, int) else None
    return {
        RECURRENT: (by_interval, [*linear, *dense] if RECURRENT in stored else linear),
        "full_attention_interval": (interval, interval),
    }


def rope_factors(config: Mapping[str, Any], pairs: int) -> list[float] | None:
    """Return llama.cpp's divisors of frequencies (`rope_freqs.weight`); None without any."""
    get = Values(config)
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
