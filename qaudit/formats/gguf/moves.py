"""Tensors that llama.cpp's converter joins, splits, turns or renames, made dense again.

`gguf` knows one name in a file for one name of a release. Where a dense tensor is made of several,
or of one in another order, a move says which and how (classes in `conversion/*.py`, b11549).
H: heads, E: experts, R: rows, C: columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


# ------------------------------------------------------------------------- recurrent blocks


def _flat(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    return parts[0].flatten()


def _with_channel(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    return parts[0].unsqueeze(1)


def _log(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    values = (-parts[0]).log()
    return values[:, 0] if values.dim() > 1 and values.shape[1] == 1 else values


# -------------------------------------------------------------------------------- attention


def _kv_of_latents(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Join keys (H, C, R) and values (H, R, C) of each head (DeepSeek)."""
    rows_HRC = torch.cat([parts[0].transpose(1, 2), parts[1]], 1)
    return rows_HRC.flatten(0, 1)


def _by_groups(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Put queries, keys and values of each group of heads together (Falcon, Bloom)."""
    heads, shared = _heads(header)
    per_head = parts[0].shape[0] // (heads + 2 * shared)
    split = torch.split(parts[0], [heads * per_head, shared * per_head, shared * per_head])
    groups = [part.reshape(shared, -1, *part.shape[1:]) for part in split]
    return torch.cat(groups, 1).flatten(0, 1)


def _by_heads(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Put query, key and value of each head together (GPT-NeoX)."""
    heads, _ = _heads(header)
    split = parts[0].reshape(3, heads, -1, *parts[0].shape[1:])
    return split.transpose(0, 1).flatten(0, 2)


def _heads(header: GgufHeader) -> tuple[int, int]:
    heads = int(header.largest("attention.head_count") or 1)
    return heads, int(header.largest("attention.head_count_kv") or heads)


# ------------------------------------------------------------------------- linear attention


def _shared_and_each(header: GgufHeader) -> tuple[int, int]:
    """Return the heads of keys, and how many heads of values share one."""
    keys, values = (int(header.number(f"ssm.{n}") or 1) for n in ("group_count", "time_step_rank"))
    return keys, values // keys


def _grouped(values: Tensor, header: GgufHeader, dim: int = 0) -> Tensor:
    """Put heads of values that share a key beside one another; llama.cpp has them a key apart."""
    keys, each = _shared_and_each(header)
    shape = values.shape
    split = values.reshape(*shape[:dim], each, keys, -1, *shape[dim + 1 :])
    return split.transpose(dim, dim + 1).flatten(dim, dim + 2)


def _grouped_rows(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    return _grouped(parts[0], header)


def _grouped_columns(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    return _grouped(parts[0], header, 1)


def _grouped_log(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    return _grouped(_log(parts, header), header)


def _grouped_values(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Leave queries and keys, and group values behind them."""
    rows = int(header.number("ssm.inner_size") or 0)
    others = parts[0].shape[0] - rows
    return torch.cat([parts[0][:others], _grouped(parts[0][others:], header)])


def _grouped_values_with_channel(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    return _grouped_values(parts, header).unsqueeze(1)


def _by_keys(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Put query, key, values and gates of each head of keys together (Qwen3-Next)."""
    keys, _ = _shared_and_each(header)
    rows = int(header.number("ssm.inner_size") or 0)
    others = (parts[0].shape[0] - rows) // 2
    split = (*torch.split(parts[0], [others, others, rows]), parts[1])
    return torch.cat([part.reshape(keys, -1, *part.shape[1:]) for part in split], 1).flatten(0, 1)


# ---------------------------------------------------------------------------------- experts


def _joined(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Put the rows of gates above those of ups."""
    return torch.cat(list(parts), -2)


def _joined_turned(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    return _joined(parts, header).transpose(1, 2)


def _alternating(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Let gates and ups take turns: of matrices in columns, of biases too (gpt-oss)."""
    turned = [part.transpose(1, 2) if part.dim() > 2 else part for part in parts]
    return torch.stack(turned, -1).flatten(-2)


def _turned(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    return parts[0].transpose(-1, -2)


def _rows_of_all(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    """Put the rows of all experts below one another (DBRX)."""
    return parts[0].flatten(0, 1)


def _turned_rows_of_all(parts: Sequence[Tensor], header: GgufHeader) -> Tensor:
    return parts[0].transpose(1, 2).flatten(0, 1)


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
    Move(r"self_attn\.kv_b_proj\.weight", ("attn_k_b.weight", "attn_v_b.weight"), _kv_of_latents),
)
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
    Move(r"linear_attn\.in_proj_z\.weight", ("attn_gate.weight",), _grouped_rows),
    Move(r"linear_attn\.in_proj_a\.weight", ("ssm_alpha.weight",), _grouped_rows),
    Move(r"linear_attn\.in_proj_b\.weight", ("ssm_beta.weight",), _grouped_rows),
    Move(r"linear_attn\.out_proj\.weight", ("ssm_out.weight",), _grouped_columns),
    Move(r"linear_attn\.A_log", ("ssm_a",), _grouped_log),
    Move(r"linear_attn\.dt_bias", ("ssm_dt.bias",), _grouped_rows),
    Move(r"linear_attn\.conv1d\.weight", ("ssm_conv1d.weight",), _grouped_values_with_channel),
    Move(r"mlp\.experts\.gate_up_proj", _GATE_UP, _joined),
    Move(r"mlp\.experts\.down_proj", ("ffn_down_exps.weight",)),
)
NEMOTRON_H = (
    Move(r"mixer\.experts\.(up|down)_proj\.weight", ("ffn_{}_exps.weight",)),
    Move(r"mixer\.gate\.weight", ("ffn_gate_inp.weight",)),
)
GEMMA4 = (Move(r"layer_scalar", ("layer_output_scale.weight",)),)
