"""Tensors that llama.cpp's converter joins, splits or turns become those of the release again.

Each test writes what the converter's class says of one tensor; `make peers` runs the converter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from qaudit.errors import SourceError
from qaudit.formats.gguf.architectures import ARCHITECTURES, EVERYWHERE, made, place_of
from qaudit.formats.gguf.header import GgufHeader

HEADS, SHARED, PER_HEAD, WIDTH, EXPERTS = 4, 2, 8, 16, 3


def header(architecture: str) -> GgufHeader:
    numbers = {"attention.head_count": HEADS, "attention.head_count_kv": SHARED,
               "ssm.group_count": SHARED, "ssm.time_step_rank": HEADS,
               "ssm.inner_size": HEADS * PER_HEAD}  # fmt: skip
    metadata = {f"{architecture}.{key}": value for key, value in numbers.items()}
    return GgufHeader({"general.architecture": architecture, **metadata}, {})


def random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5


def fused_attention(qkv: Tensor) -> Sequence[Tensor]:
    groups = qkv.reshape(SHARED, HEADS // SHARED + 2, PER_HEAD, *qkv.shape[1:])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return [torch.cat([part.reshape(-1, *qkv.shape[1:]) for part in parts])]


def of_latents(kv: Tensor) -> Sequence[Tensor]:
    keys, values = kv.reshape(HEADS, -1, WIDTH).split([5, 7], 1)
    return [keys.transpose(1, 2), values]


def linear_attention(fused: Tensor) -> Sequence[Tensor]:
    """Let the heads of values of a key be apart, as `_reorder_v_heads` does."""
    others, values = fused[: -HEADS * PER_HEAD], fused[-HEADS * PER_HEAD :]
    return [torch.cat([others, apart(values)])]


def apart(values: Tensor) -> Tensor:
    split = values.reshape(SHARED, HEADS // SHARED, -1, *values.shape[1:])
    return split.transpose(0, 1).reshape(values.shape)


def keys_values_gates(fused: Tensor) -> Sequence[Tensor]:
    each = HEADS // SHARED * PER_HEAD
    groups = fused.reshape(SHARED, -1, WIDTH).split([5, 5, each, each], 1)
    query, key, values, gates = (part.reshape(-1, WIDTH) for part in groups)
    return [torch.cat([query, key, values]), gates]


def by_role(qkv: Tensor) -> Sequence[Tensor]:
    return [qkv.reshape(HEADS, 3, PER_HEAD, WIDTH).transpose(0, 1).reshape(-1, WIDTH)]


def halves(fused: Tensor) -> Sequence[Tensor]:
    return list(fused.chunk(2, -2))


CASES: list[tuple[str, str, Tensor, Callable[[Tensor], Sequence[Tensor]]]] = [
    ("falcon", "self_attention.query_key_value.weight",
     random((HEADS + 2 * SHARED) * PER_HEAD, WIDTH), fused_attention),
    ("bloom", "self_attention.query_key_value.bias",
     random((HEADS + 2 * SHARED) * PER_HEAD), fused_attention),
    ("deepseek2", "self_attn.kv_b_proj.weight", random(HEADS * 12, WIDTH), of_latents),
    ("gpt-oss", "mlp.experts.gate_up_proj", random(EXPERTS, WIDTH, 10),
     lambda t: [t.transpose(1, 2)[:, ::2], t.transpose(1, 2)[:, 1::2]]),
    ("gpt-oss", "mlp.experts.gate_up_proj_bias", random(EXPERTS, 10),
     lambda t: [t[:, ::2], t[:, 1::2]]),
    ("gpt-oss", "mlp.experts.down_proj", random(EXPERTS, 10, WIDTH),
     lambda t: [t.transpose(1, 2)]),
    ("granitemoe", "block_sparse_moe.input_linear.weight", random(EXPERTS, 10, WIDTH), halves),
    ("granitemoe", "shared_mlp.input_linear.weight", random(10, WIDTH), halves),
    ("dbrx", "ffn.experts.mlp.w1", random(EXPERTS * 10, WIDTH),
     lambda t: [t.reshape(EXPERTS, 10, WIDTH)]),
    ("dbrx", "ffn.experts.mlp.w2", random(EXPERTS * 10, WIDTH),
     lambda t: [t.reshape(EXPERTS, 10, WIDTH).transpose(1, 2)]),
    ("gpt2", "attn.c_attn.weight", random(10, WIDTH), lambda t: [t.T]),
    ("qwen35", "linear_attn.in_proj_qkv.weight", random(20 + HEADS * PER_HEAD, WIDTH),
     linear_attention),
    ("qwen35", "linear_attn.in_proj_z.weight", random(HEADS * PER_HEAD, WIDTH),
     lambda t: [apart(t)]),
    ("qwen35", "linear_attn.out_proj.weight", random(WIDTH, HEADS * PER_HEAD),
     lambda t: [apart(t.T).T]),
    ("qwen35", "linear_attn.dt_bias", random(HEADS), lambda t: [apart(t)]),
    ("qwen35moe", "mlp.experts.gate_up_proj", random(EXPERTS, 10, WIDTH), halves),
    ("qwen3next", "linear_attn.in_proj_qkvz.weight",
     random(SHARED * 10 + 2 * HEADS * PER_HEAD, WIDTH), keys_values_gates),
    ("gptneox", "attention.query_key_value.weight", random(3 * HEADS * PER_HEAD, WIDTH), by_role),
    ("lfm2", "conv.conv.weight", random(WIDTH, 1, 3), lambda t: [t[:, 0]]),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "name", "dense", "stored_of"), CASES)
def test_a_moved_tensor_is_made_again(
    architecture: str, name: str, dense: Tensor, stored_of: Callable[[Tensor], Sequence[Tensor]]
) -> None:
    moves = (*ARCHITECTURES[architecture].moves, *EVERYWHERE)
    place = place_of(moves, f"model.layers.7.{name}")
    assert place is not None
    tensors, made = place
    stored = stored_of(dense)
    assert len(tensors) == len(stored) and all(one.startswith("blk.7.") for one in tensors)
    assert made is not None
    assert torch.equal(made(stored, header(architecture)), dense)
    empty = [part.to("meta") for part in stored]
    assert made(empty, header(architecture)).shape == dense.shape


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("model.layers.3.mlp.gate.e_score_correction_bias", "blk.3.exp_probs_b.bias"),
        ("model.layers.3.self_attn.sinks", "blk.3.attn_sinks.weight"),
        ("model.norm.weight", None),
        ("model.layers.3.mlp.up_proj.weight", None),
    ],
)
def test_a_renamed_tensor_is_read_as_it_is(name: str, own: str | None) -> None:
    assert place_of(EVERYWHERE, name) == (((own,), None) if own else None)


@pytest.mark.parametrize("number", [-2, 0, 3, 2**40, math.nan, "many", [1, "many"]])
def test_numbers_of_a_header_that_do_not_fit_are_refused(number: object) -> None:
    """They divide sizes; whatever they are, a tensor is made or refused by name."""
    names = [key for key in header("falcon").metadata if key.startswith("falcon.")]
    for architecture, name, dense, stored_of in CASES:
        _, make = place_of((*ARCHITECTURES[architecture].moves, *EVERYWHERE), f"blocks.7.{name}")
        parts = [part.to("meta") for part in stored_of(dense)]
        for key in names:
            hostile = header(architecture)
            hostile.metadata[key.replace("falcon", architecture)] = number
            try:
                assert made(name, make, parts, hostile).numel() == dense.numel()
            except SourceError as refusal:
                assert name in str(refusal)
