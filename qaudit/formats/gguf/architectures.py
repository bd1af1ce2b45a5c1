"""Architectures of llama.cpp that are read: which models they are, and what its converter changes.

`gguf` knows one name in a file for one name of a release. Where the converter joins, splits, turns
or renames, a move says of which tensors a dense one is made, and how. Each architecture is held to
llama.cpp's own logits of a tiny file (tests/peers/test_llamacpp.py). Facts are those of the classes
in `conversion/*.py` and of `src/models/*.cpp` (b11549).
H: heads, E: experts, R: rows, C: columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from qaudit.formats.gguf.header import GgufHeader
from qaudit.formats.reading import refused
from qaudit.support.lazy import Tensor, torch

Dense = Callable[[Sequence["Tensor"], GgufHeader], "Tensor"]
"""Return a dense tensor of those of a file."""

BLOCK = re.compile(r"(?:[a-z_]+\.)+?(\d+)\.(.+)")


@dataclass(frozen=True)
class Move:
    """Which tensors of a file a dense tensor of a block is made of."""

    name: str  # a pattern of what is behind the number of the block
    places: tuple[str, ...]  # behind `blk.N.`; `{}` is what the pattern's group holds
    dense: Dense | None = None  # None: the tensor as it is


def place_of(moves: Sequence[Move], name: str) -> tuple[tuple[str, ...], Dense | None] | None:
    """Return the tensors of a file that a dense one is made of, and how; None without a move."""
    block = BLOCK.fullmatch(name)
    if block is None:
        return None
    for move in moves:
        if match := re.fullmatch(move.name, block[2]):
            places = (place.format(*match.groups()) for place in move.places)
            return tuple(f"blk.{block[1]}.{place}" for place in places), move.dense
    return None


def made(name: str, dense: Dense, parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Make a dense tensor, or refuse parts and numbers of a header that do not fit."""
    try:
        return dense(parts, header)
    except (RuntimeError, IndexError, ZeroDivisionError) as error:
        shapes = " and ".join(str(list(part.shape)) for part in parts)
        raise refused(name, f"cannot be made of tensors of the shapes {shapes}") from error


def _then(
    change: Callable[[Tensor], Tensor], dense: Dense = lambda parts, header: parts[0]
) -> Dense:
    """Change the first tensor, or what is made of all."""
    return lambda parts, header: change(dense(parts, header))


def _log(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    values = (-parts[0]).log()
    return values[:, 0] if values.dim() > 1 and values.shape[1] == 1 else values


def _by_groups(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Put queries, keys and values of each group of heads together (Falcon, Bloom)."""
    heads, shared = _heads(header)
    per_head = parts[0].shape[0] // (heads + 2 * shared)
    split = torch.split(parts[0], [heads * per_head, shared * per_head, shared * per_head])
    groups = [part.reshape(shared, -1, *part.shape[1:]) for part in split]
    return torch.cat(groups, 1).flatten(0, 1)


def _by_heads(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Put query, key and value of each head together (GPT-NeoX)."""
    split = parts[0].reshape(3, _heads(header)[0], -1, *parts[0].shape[1:])
    return split.transpose(0, 1).flatten(0, 2)


def _heads(header: GgufHeader) -> tuple[int, int]:
    heads = int(header.largest("attention.head_count") or 1)
    return heads, int(header.largest("attention.head_count_kv") or heads)


def _shared_and_each(header: GgufHeader) -> tuple[int, int]:
    """Return the heads of keys, and how many heads of values share one."""
    keys, values = (int(header.number(f"ssm.{n}") or 1) for n in ("group_count", "time_step_rank"))
    return keys, values // keys


def _grouped(parts: Sequence[Tensor], header: GgufHeader, dim: int = 0) -> Tensor:
    """Put heads of values that share a key beside one another; llama.cpp has them a key apart."""
    keys, each = _shared_and_each(header)
    shape = parts[0].shape
    split = parts[0].reshape(*shape[:dim], each, keys, -1, *shape[dim + 1 :])
    return split.transpose(dim, dim + 1).flatten(dim, dim + 2)


def _grouped_values(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Leave queries and keys, and group values behind them."""
    rows = int(header.number("ssm.inner_size") or 0)
    before = parts[0].shape[0] - rows
    return torch.cat([parts[0][:before], _grouped([parts[0][before:]], header)])


def _by_keys(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Put query, key, values and gates of each head of keys together (Qwen3-Next)."""
    keys, _ = _shared_and_each(header)
    rows = int(header.number("ssm.inner_size") or 0)
    each = (parts[0].shape[0] - rows) // 2
    split = (*torch.split(parts[0], [each, each, rows]), parts[1])
    return torch.cat([part.reshape(keys, -1, *part.shape[1:]) for part in split], 1).flatten(0, 1)


def _joined(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Put the rows of gates above those of ups."""
    return torch.cat(list(parts), -2)


def _alternating(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Let gates and ups take turns: of matrices in columns, of biases too (gpt-oss)."""
    turned = [part.transpose(1, 2) if part.dim() > 2 else part for part in parts]
    return torch.stack(turned, -1).flatten(-2)


_flat = _then(lambda x: x.flatten())
_with_channel = _then(lambda x: x.unsqueeze(1))
_turned = _then(lambda x: x.transpose(-1, -2))
_rows_of_all = _then(lambda x: x.flatten(0, 1))  # of all experts, below one another (DBRX)
_turned_rows_of_all = _then(lambda x: x.transpose(1, 2).flatten(0, 1))
_joined_turned = _then(lambda x: x.transpose(1, 2), _joined)
_grouped_values_with_channel = _then(lambda x: x.unsqueeze(1), _grouped_values)

_GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")

XIELU = re.compile(r"mlp\.act_fn\.(alpha_n|alpha_p|beta|eps)")
"""Numbers of Apertus' activations, which are metadata: `xielu.*`, one for each block."""

EVERYWHERE = (
    Move(r".*\b(?:e_score_correction_bias|expert_bias)", ("exp_probs_b.bias",)),
    Move(r".*\.A_log", ("ssm_a",), _log),
    Move(r".*\.D", ("ssm_d",), _flat),
    Move(r".*\.dt_bias", ("ssm_dt.bias",), _flat),
    Move(r".*\.conv1d\.weight", ("ssm_conv1d.weight",), _with_channel),
    Move(r"conv\.conv\.weight", ("shortconv.conv.weight",), _with_channel),
    Move(r"(?:mamba|mixer)\.norm\.weight", ("ssm_norm.weight",), _flat),
    Move(r"self_attn\.sinks", ("attn_sinks.weight",)),
    Move(  # keys (H, C, R) and values (H, R, C) of each head, joined (DeepSeek)
        r"self_attn\.kv_b_proj\.weight", ("attn_k_b.weight", "attn_v_b.weight"),
        lambda parts, header: torch.cat([parts[0].transpose(1, 2), parts[1]], 1).flatten(0, 1),
    ),
)  # fmt: skip
"""What all architectures have that have tensors of these names."""

GPT_OSS = (
    Move(r"mlp\.experts\.gate_up_proj", _GATE_UP, _alternating),
    Move(r"mlp\.experts\.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
         _alternating),
    Move(r"mlp\.experts\.down_proj", ("ffn_down_exps.weight",), _turned),
    Move(r"mlp\.experts\.down_proj_bias", ("ffn_down_exps.bias",)),
)  # fmt: skip
LLAMA4 = (
    Move(r"feed_forward\.experts\.gate_up_proj", _GATE_UP, _joined_turned),
    Move(r"feed_forward\.experts\.down_proj", ("ffn_down_exps.weight",), _turned),
)
GRANITE = (
    Move(r"block_sparse_moe\.input_linear\.weight", _GATE_UP, _joined),
    Move(r"shared_mlp\.input_linear\.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
         _joined),
)  # fmt: skip
LFM2_MOE = (
    Move(r"feed_forward\.experts\.w1\.weight", ("ffn_gate_exps.weight",)),
    Move(r"feed_forward\.experts\.w3\.weight", ("ffn_up_exps.weight",)),
    Move(r"feed_forward\.experts\.w2\.weight", ("ffn_down_exps.weight",)),
)
DBRX = (
    Move(r"ffn\.experts\.mlp\.w1", ("ffn_gate_exps.weight",), _rows_of_all),
    Move(r"ffn\.experts\.mlp\.v1", ("ffn_up_exps.weight",), _rows_of_all),
    Move(r"ffn\.experts\.mlp\.w2", ("ffn_down_exps.weight",), _turned_rows_of_all),
)
BY_GROUPS = (Move(r"self_attention\.query_key_value\.(\w+)", ("attn_qkv.{}",), _by_groups),)
GPT2 = (
    Move(r"attn\.c_attn\.weight", ("attn_qkv.weight",), _turned),
    Move(r"attn\.c_proj\.weight", ("attn_output.weight",), _turned),
    Move(r"mlp\.c_fc\.weight", ("ffn_up.weight",), _turned),
    Move(r"mlp\.c_proj\.weight", ("ffn_down.weight",), _turned),
)
GPT_NEOX = (Move(r"attention\.query_key_value\.(\w+)", ("attn_qkv.{}",), _by_heads),)
QWEN3_NEXT = (
    Move(r"linear_attn\.in_proj_qkvz\.weight", ("attn_qkv.weight", "attn_gate.weight"), _by_keys),
)
QWEN35 = (
    Move(r"linear_attn\.in_proj_qkv\.weight", ("attn_qkv.weight",), _grouped_values),
    Move(r"linear_attn\.in_proj_z\.weight", ("attn_gate.weight",), _grouped),
    Move(r"linear_attn\.in_proj_a\.weight", ("ssm_alpha.weight",), _grouped),
    Move(r"linear_attn\.in_proj_b\.weight", ("ssm_beta.weight",), _grouped),
    Move(r"linear_attn\.out_proj\.weight", ("ssm_out.weight",), partial(_grouped, dim=1)),
    Move(r"linear_attn\.A_log", ("ssm_a",),
         lambda parts, header: _grouped([_log(parts, header)], header)),
    Move(r"linear_attn\.dt_bias", ("ssm_dt.bias",), _grouped),
    Move(r"linear_attn\.conv1d\.weight", ("ssm_conv1d.weight",), _grouped_values_with_channel),
    Move(r"mlp\.experts\.gate_up_proj", _GATE_UP, _joined),
    Move(r"mlp\.experts\.down_proj", ("ffn_down_exps.weight",)),
)  # fmt: skip
NEMOTRON_H = (
    Move(r"mixer\.experts\.(up|down)_proj\.weight", ("ffn_{}_exps.weight",)),
    Move(r"mixer\.gate\.weight", ("ffn_gate_inp.weight",)),
)
GEMMA4 = (Move(r"layer_scalar", ("layer_output_scale.weight",)),)


# --------------------------------------------------------------------------- architectures

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
_LOGITS = {"logit_scale": (None, "logit_scale")}
_OF_HEADS = ("attention.key_length", "attention.value_length", "attention.head_count_kv")
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


_NORMS: Any = {"layer_norms": True, "epsilon": "layer_norm_eps"}
_LONG_NORMS: Any = {"layer_norms": True, "epsilon": "layer_norm_epsilon"}
_MAMBA = Architecture(
    ("mamba", "falcon_mamba"), epsilon="layer_norm_epsilon", keys=_STATE,
    free=("feed_forward_length", "attention.head_count", "rope.dimension_count", *_OF_HEADS),
)  # fmt: skip
_NEMOTRON_H = Architecture(
    ("nemotron_h",), **_LONG_NORMS, interleaved=True, activations=(), layered=True, keys=_STATE,
    moves=NEMOTRON_H, free=("feed_forward_length", "rope.dimension_count"),
    needs={"mlp_hidden_act": (None, "relu2")},
)  # fmt: skip

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
    **{
        name: Architecture((name,))
        for name in ("qwen2", "qwen3", "phi3", "seed_oss", "glm4", "ernie4_5", "dots1")
    },
    "qwen2moe": Architecture(("qwen2_moe",), normalizes=False, needs=_EXPERTS_EVERYWHERE),
    "qwen3moe": Architecture(("qwen3_moe",), normalizes=True, needs=_EXPERTS_EVERYWHERE),
    "smollm3": Architecture(("smollm3",), interleaved=True),
    "gemma": Architecture(("gemma",), adds_one=True, activations=_TANH),
    "gemma2": Architecture(("gemma2",), adds_one=True, activations=_TANH, period=2),
    "gemma3": Architecture(
        ("gemma3_text",), adds_one=True, activations=_TANH, period=6,
        keys={"final_logit_softcapping": (0, "final_logit_softcapping")},
    ),
    "granite": Architecture(("granite",), interleaved=True, keys=_MULTIPLIERS),
    "granitemoe": Architecture(
        ("granitemoe", "granitemoeshared"), interleaved=True, keys=_MULTIPLIERS,
        moves=GRANITE,
    ),
    "starcoder2": Architecture(
        ("starcoder2",), layer_norms=True, epsilon="norm_epsilon", activations=_TANH
    ),
    "nemotron": Architecture(
        ("nemotron",), adds_one=True, layer_norms=True, epsilon="norm_eps", activations=("relu2",)
    ),
    "stablelm": Architecture(("stablelm",), **_NORMS),
    "command-r": Architecture(("cohere",), **_NORMS, keys=_LOGITS),
    "cohere2": Architecture(("cohere2",), **_NORMS, period=4, keys=_LOGITS),
    "gpt-oss": Architecture(
        ("gpt_oss",), period=2, gating=SOFTMAX_OF_CHOSEN, moves=GPT_OSS,
        needs={"swiglu_limit": (None, 7.0)},
    ),
    "arcee": Architecture(("arcee",), interleaved=True, activations=("relu2",)),
    "glm4moe": Architecture(("glm4_moe",), gating=SIGMOID),
    "ernie4_5-moe": Architecture(
        ("ernie4_5_moe",), normalizes=True,
        keys={"interleave_moe_layer_step": (None, "moe_layer_interval")},
    ),
    "hunyuan-dense": Architecture(("hunyuan_v1_dense",)),
    "lfm2": Architecture(
        ("lfm2",), epsilon="norm_eps", free=("feed_forward_length",), layered=True
    ),
    "lfm2moe": Architecture(
        ("lfm2_moe",), epsilon="norm_eps", normalizes=True, layered=True, moves=LFM2_MOE
    ),
    "deepseek2": Architecture(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), free=_OF_HEADS,
    ),
    "falcon": Architecture(
        ("falcon",), **_LONG_NORMS, activations=("gelu",), moves=BY_GROUPS,
        needs={"alibi": (None, False), "parallel_attn": (None, True), "bias": (None, False)},
    ),
    "bloom": Architecture(
        ("bloom",), **_LONG_NORMS, activations=(), moves=BY_GROUPS,
        needs={"apply_residual_connection_post_layernorm": (None, False)},
    ),
    "dbrx": Architecture(("dbrx",), layer_norms=True, epsilon="", normalizes=True, moves=DBRX),
    "gpt2": Architecture(
        ("gpt2",), **_LONG_NORMS, activations=_TANH, moves=GPT2,
        needs={"scale_attn_weights": (None, True), "add_cross_attention": (None, False),
               "scale_attn_by_inverse_layer_idx": (None, False)},
    ),
    "qwen3next": Architecture(
        ("qwen3_next",), adds_one=True, normalizes=True, moves=QWEN3_NEXT, keys=_STATE,
        needs=_EXPERTS_EVERYWHERE,
    ),
    "qwen35": Architecture(("qwen3_5_text",), adds_one=True, moves=QWEN35, keys=_STATE),
    "qwen35moe": Architecture(
        ("qwen3_5_moe_text",), adds_one=True, normalizes=True, moves=QWEN35, keys=_STATE,
        free=("feed_forward_length",),
    ),
    "minimax-m2": Architecture(("minimax_m2",), normalizes=True),
    "llama4": Architecture(
        ("llama4_text",), gating=SIGMOID, moves=LLAMA4, free=("feed_forward_length",),
        needs={"attention_chunk_size": (None, 8192), "floor_scale": (None, 8192),
               "attn_scale": (None, 0.1), "attn_temperature_tuning": (None, 4, True)},
    ),
    "exaone-moe": Architecture(("exaone_moe",)),
    "gptneox": Architecture(
        ("gpt_neox",), **_NORMS, activations=("gelu",), moves=GPT_NEOX,
        keys={"use_parallel_residual": (None, "use_parallel_residual")},
    ),
    "mpt": Architecture(
        ("mpt",), **_LONG_NORMS, activations=(), free=("feed_forward_length",),
        keys={"attention.max_alibi_bias": (0, "alibi_bias_max")},
        needs={"alibi": (None, True), "qk_ln": (None, False), "softmax_scale": (None,)},
    ),
    "starcoder": Architecture(
        ("gpt_bigcode",), **_LONG_NORMS, activations=_TANH,
        needs={"multi_query": (None, True), "scale_attn_weights": (None, True)},
    ),
    "granitehybrid": Architecture(
        ("granitemoehybrid",), interleaved=True, layered=True, normalizes=True,
        moves=GRANITE, keys={**_MULTIPLIERS, **_STATE},
    ),
    "jamba": Architecture(("jamba",), layered=True, normalizes=False, keys=_STATE),
    "mamba": _MAMBA,
    "mamba2": replace(_MAMBA, types=("mamba2",)),
    "apertus": Architecture(("apertus",), activations=("xielu",)),
    "afmoe": Architecture(("afmoe",), period=4, gating=SIGMOID, needs={"mup_enabled": (True,)}),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(_NEMOTRON_H, gating=SIGMOID),
    "gemma4": Architecture(
        ("gemma4_text",), activations=_TANH, moves=GEMMA4, free=("feed_forward_length",),
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
    "mistral3": Architecture(("ministral3",), interleaved=True, needs={"sliding_window": (None,)}),
    "exaone4": Architecture(("exaone4",), needs={"sliding_window": (None,)}),
    "jais2": Architecture(("jais2",), **_NORMS, activations=("relu2",)),
    "phi2": Architecture(("phi",), **_NORMS, activations=_TANH),
    "qwen2vl": Architecture(("qwen2_vl_text", "qwen2_5_vl_text")),
}  # fmt: skip

UNPROVED = {
    "llama.cpp's logits of a tiny file are 3e-3 away from those of transformers": ("qwen3vl",),
    "the converter expects its experts in another layout than transformers writes": ("qwen3vlmoe",),
    "its converter knows the wrapper alone, and its text is not tried": ("mistral4",),
    "its converter reads other names of tensors than transformers writes": ("kimi-linear",),
    "llama.cpp's logits of a tiny file are those of another model": ("hunyuan-moe",),
    "it is the text of a wrapper that is not tried": (
        "hunyuan_vl",
        "paddleocr",
        "deepseek2-ocr",
        "chameleon",
    ),
    "its multipliers are folded into the weights of a file": ("falcon-h1",),
    "its converter writes another epsilon than transformers has for GLM": ("chatglm",),
    "its converter has no name for the head that transformers writes": ("bitnet",),
    "its blocks share more than hidden states, which is not tested with files": (
        "gemma3n",
        "glm-dsa",
    ),
    "its converter needs keys that transformers does not write": ("mimo2",),
    "its scales are constants of llama.cpp, which are not compared": ("minicpm3",),
    "its converter needs factors of rotations for long texts, which are not read": ("phimoe",),
    "llama.cpp has its name and no graph": ("gptj",),
    "it has an encoder": ("t5",),
    "it is an encoder": ("t5encoder",),
}
"""Why files are not read of architectures whose models transformers has, too."""
