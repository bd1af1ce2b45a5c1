"""Which type llama.cpp gives each linear of a `_M` file, and where columns do not fit a type.

The rules are those of `llama-quant.cpp` for dense models: values, outputs of attention and the
second matrix of the feed-forward get more bits, in some blocks or in all. The role of a
linear is that of the last part of its name, as transformers has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qaudit.core.gguf.blocks import TYPES

FALLBACKS = {"Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What llama.cpp stores where 256 does not divide the columns."""

_ROLES = {
    "value": ("v_proj", "value", "attn_v"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "att_proj", "attn_qkv"),
    "attention output": ("o_proj", "out_proj", "attn_out", "attention.dense", "attn.c_proj"),
    "down": ("down_proj", "dense_4h_to_h", "fc2", "ff_out", "mlp.c_proj"),
    "other": (
        "q_proj", "k_proj", "gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", "fc1",
        "ff_proj", "mlp.c_fc",
    ),
}  # fmt: skip
_LARGE = 80
"""Blocks of a model that llama.cpp takes for one of 70B, if its heads share keys and values."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a linear is: its block, of how many, and whether its heads share values."""

    name: str
    block: int
    blocks: int
    shares_values: bool = False


def role_of(name: str) -> str | None:
    for role, ends in _ROLES.items():
        if any(name == end or name.endswith(f".{end}") for end in ends):
            return role
    return None


def shares_values(rows: Mapping[str, int]) -> bool:
    """Return whether heads share keys and values: fewer rows of values than of queries."""
    by_role = {name.rpartition(".")[2]: count for name, count in rows.items()}
    return by_role.get("v_proj", 0) < by_role.get("q_proj", 0)


def fallback(kind: str, columns: int) -> str | None:
    """Return the type that columns can have; None where 32 does not divide them either."""
    if columns % TYPES[kind].columns:
        kind = FALLBACKS.get(kind, kind)
    return None if columns % TYPES[kind].columns else kind


def type_in_mix(mix: str, place: TensorPlace) -> str:
    """Return the type of a linear in a `_M` file, before columns that do not fit."""
    role, block, blocks = role_of(place.name), place.block, place.blocks
    is_large = blocks == _LARGE and place.shares_values
    if mix == "Q3_K":
        if role in ("value", "qkv"):
            return "Q5_K" if block < 2 or (role == "value" and is_large) else "Q4_K"
        if role == "down":
            return "Q5_K" if block < blocks // 16 else "Q4_K"
        return "Q4_K" if role == "attention output" else "Q3_K"
    # In the first and the last eighth of blocks, and in every third one between.
    first = blocks // 8
    more = block < first or block >= 7 * blocks // 8 or (block - first) % 3 == 2
    if role in ("value", "qkv", "down") and more:
        return "Q6_K"
    return "Q5_K" if role == "value" and is_large else "Q4_K"
