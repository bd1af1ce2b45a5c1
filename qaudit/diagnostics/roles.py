"""What a linear does in a block, by the name that its family gives it.

Families name the same thing differently, and some fuse what others keep apart. A role is what
is compared across blocks and models: q, k, v, o, gate, up, down, and what is fused by all of its
parts. An unknown name is a role of its own.
"""

from __future__ import annotations

_BY_PATH = {
    "attention.dense": "o",  # GPT-NeoX; elsewhere `dense` may be anything
    "self_attention.dense": "o",  # Bloom, Falcon
    "self_attn.dense": "o",  # Phi
    "attn.c_proj": "o",
    "mlp.c_proj": "down",
}
_BY_NAME = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "out_proj": "o",
    "qkv_proj": "qkv",
    "query_key_value": "qkv",
    "c_attn": "qkv",
    "gate_proj": "gate",
    "gate_up_proj": "gate+up",
    "up_proj": "up",
    "fc1": "up",
    "fc_in": "up",
    "c_fc": "up",
    "dense_h_to_4h": "up",
    "down_proj": "down",
    "fc2": "down",
    "fc_out": "down",
    "dense_4h_to_h": "down",
}


def role_of(linear: str) -> str:
    parts = linear.split(".")
    by_path = _BY_PATH.get(".".join(parts[-2:]))
    return by_path or _BY_NAME.get(parts[-1], parts[-1])
