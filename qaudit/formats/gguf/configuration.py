"""A configuration as llama.cpp's converter reads it: many names for one value, and defaults.

`config.json` may leave out what transformers has by default. `defaults.json` has these by model
type, of the names that are read here; `python -m tests.support.gguf_defaults` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_USUAL: Mapping[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
_PARTS = ("attn_config", "ffn_config")  # of DBRX


@cache
def defaults() -> Mapping[str, Mapping[str, Any]]:
    """Return what transformers takes where a configuration has none, by model type."""
    text = Path(__file__).with_name("defaults.json").read_text(encoding="utf-8")
    table: Mapping[str, Mapping[str, Any]] = json.loads(text)
    return table


class Values:
    """A configuration with the defaults of its model type, and its rotations in either form."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.type = str(config.get("model_type"))
        written = {key: value for key, value in config.items() if value is not None}
        for part in _PARTS:
            inner = config.get(part)
            written |= inner if isinstance(inner, Mapping) else {}
        usual = {**_USUAL, **defaults().get(self.type, {})}
        self._written = written  # `null` is no default, but nothing
        self._default = {name: value for name, value in usual.items() if name not in config}
        tables = [
            written.get("rope_parameters"),
            written.get("rope_scaling"),
            written,
            self._default,
        ]
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
    def hidden(self) -> int | None:
        return self._whole("hidden_size", "n_embd", "d_model")

    @property
    def heads(self) -> int | None:
        return self._whole("num_attention_heads", "n_head", "n_heads")

    @property
    def shared_heads(self) -> int | None:
        """The heads of keys and values."""
        if self.type == "gpt_bigcode" and self("multi_query"):
            return 1
        if self.type == "falcon" and not self("new_decoder_architecture"):
            return 1 if self("multi_query") else self.heads
        return self._whole("num_key_value_heads", "num_kv_heads", "kv_n_heads") or self.heads

    def of_full_attention(self, name: str) -> int | None:
        """Return what layers without a window have otherwise (Gemma 4)."""
        layers = self("per_layer_config")
        tables = layers.values() if isinstance(layers, Mapping) else ()
        values = (table.get(name) for table in tables if isinstance(table, Mapping))
        return next((value for value in values if isinstance(value, int)), None)

    @property
    def feed_forward(self) -> int | None:
        width = self._whole("intermediate_size", "ffn_hidden_size", "n_inner")
        return width or (4 * self.hidden if self.hidden else None)

    @property
    def experts(self) -> int:
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        return int(self(*names) or 0)

    @property
    def chosen_experts(self) -> int:
        return int(self("num_experts_per_tok", "moe_k", "moe_top_k") or 0)

    @property
    def local_theta(self) -> Any:
        """The base of rotations in layers with a window (Gemma 3)."""
        table = self("rope_parameters")
        local = table.get("sliding_attention") if isinstance(table, Mapping) else None
        named = local.get("rope_theta") if isinstance(local, Mapping) else None
        return named or self("rope_local_base_freq")

    def _whole(self, *names: str) -> int | None:
        value = self(*names)
        return value if isinstance(value, int) and not isinstance(value, bool) else None
