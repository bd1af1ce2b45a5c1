"""What a scheme measures is what a file can hold: weights are decoded codes, bits are theirs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.bnb_codes import FourBitCodes, Int8Codes
from qaudit.core.linears import Inputs, IntegerCodes, Linears
from qaudit.core.registry import parse_scheme
from qaudit.engine.kept_weights import WeightKeeper, kept_groups
from tests.support.filled import filled
from tests.support.schemes import every_plain_scheme, every_scheme, example, transform_nbits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def group_of(stored):
    """Return the group of every column, counted one by one."""
    if stored.group_of_C is not None:
        return stored.group_of_C.numpy()
    return np.array([column // stored.group for column in range(stored.codes_RC.shape[1])])


def decoded(stored):
    """Decode in numpy, in double precision, where the form is one of those known here."""
    if isinstance(stored, IntegerCodes):
        codes, scales = stored.codes_RC.double().numpy(), stored.scales_RG.double().numpy()
        assert stored.codes_RC.dtype == torch.uint8
        assert codes.max() < 2**stored.bits
        zeros = np.full_like(scales, 2 ** (stored.bits - 1))
        if stored.zeros_RG is not None:
            assert stored.zeros_RG.dtype == torch.uint8
            zeros = stored.zeros_RG.double().numpy()
            assert zeros.max() < 2**stored.bits
        groups = group_of(stored)
        assert set(groups) == set(range(scales.shape[1]))
        return (codes - zeros[:, groups]) * scales[:, groups]
    if isinstance(stored, Int8Codes):
        # Two products in float32, as in bitsandbytes.
        products = stored.codes_RC.float().numpy() * stored.absmax_R.numpy()[:, None]
        return products * np.float32(1 / 127)
    if not isinstance(stored, FourBitCodes):
        return stored.decode().double().numpy()
    codes = np.stack([stored.packed.numpy() >> 4, stored.packed.numpy() & 15], axis=1).flatten()
    maxima = stored.absmax.numpy()
    if (nested := stored.nested) is not None:
        coarse = np.repeat(nested.absmax.numpy(), 256)[: len(maxima)]
        # In float32, where bitsandbytes rounds the product and the sum.
        maxima = (nested.table.numpy()[maxima] * coarse) + nested.offset.numpy()
    blocks = np.repeat(maxima, stored.blocksize)[: len(codes)]
    values = stored.table.double().numpy()[codes] * blocks.astype(np.float64)
    return values[: int(np.prod(stored.shape))].reshape(stored.shape)


def stored_nbits(stored):
    """Count by the number of values in each tensor, where the form is one of those known here."""
    if isinstance(stored, IntegerCodes):
        rows, groups = stored.scales_RG.shape
        each = 8 * stored.scales_RG.element_size() + (0 if stored.zeros_RG is None else stored.bits)
        index = 0 if stored.group_of_C is None else 32 * stored.group_of_C.numel()
        return stored.codes_RC.numel() * stored.bits + rows * groups * each + index
    if isinstance(stored, Int8Codes):
        tensors = [stored.codes_RC, stored.absmax_R]
    elif isinstance(stored, FourBitCodes):
        tensors = [stored.packed, stored.absmax]
        if stored.nested is not None:
            tensors += [stored.nested.absmax, stored.nested.offset]
    else:
        return stored.nbits
    return sum(8 * tensor.element_size() * tensor.numel() for tensor in tensors)


def check(scheme, linears):
    """Hold a scheme's weights and bits against its stored forms, decoded in another way."""
    quantized = scheme.quantize(linears)
    assert list(quantized.stored) == list(linears.weights)
    total = sum(stored_nbits(stored) for stored in quantized.stored.values())
    assert sum(stored.nbits for stored in quantized.stored.values()) == total
    if any("unfolded" in note for note in quantized.notes):
        width = 16 if scheme.scale_dtype == "bf16" else 32
        total += width * len(quantized.column_scale_C)
    columns = next(iter(linears.weights.values())).shape[1]
    assert quantized.bits == total + transform_nbits(scheme, columns)
    for name, stored in filled(quantized.stored.items()):
        wide = torch.from_numpy(decoded(stored)).float()  # one rounding of the exact product
        assert torch.equal(stored.decode().float(), wide.to(stored.decode().dtype).float())
        if quantized.column_scale_C is not None:
            wide /= quantized.column_scale_C
        weight = quantized.weights[name]
        assert torch.equal(weight, wide.to(weight.dtype))
        if isinstance(stored, IntegerCodes) and getattr(scheme, "scale_dtype", "") == "bf16":
            scales = stored.scales_RG
            assert scales.dtype == torch.bfloat16
            assert torch.equal(scales.half().float(), scales.float())  # float16 holds them too
            assert scales.min() >= 2.0**-17


@every_scheme
def test_weights_are_decoded_from_what_is_stored(scheme):
    check(scheme, example(torch.bfloat16, fold=True))


@every_plain_scheme
def test_weights_of_every_type_are_decoded_from_what_is_stored(scheme):
    for dtype in (torch.float32, torch.float16):
        check(scheme, example(dtype))


SPECS = st.sampled_from(["rtn", "gptq", "awq"])


@given(
    name=SPECS,
    rows=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    columns=st.integers(1, 70),
    group=st.one_of(st.just(-1), st.integers(1, 80)),
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    order=st.sampled_from([{}, {"act_order": True}, {"act_group_aware": False}]),
    static_groups=st.booleans(),
    scale_dtype=st.sampled_from(["bf16", "float32"]),
    dtype=st.sampled_from(DTYPES),
    fold=st.booleans(),
    magnitude=st.sampled_from([1e-7, 1e-3, 1.0, 100.0]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_group_and_order(
    name, rows, columns, group, bits, symmetric, order, static_groups, scale_dtype, dtype, fold,
    magnitude, seed,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(columns + 20, columns, generator=generator)
    x *= torch.exp(torch.randn(columns, generator=generator))
    weights = {
        f"attn.{role}_proj": (magnitude * torch.randn(count, columns, generator=generator)).to(
            dtype
        )
        for role, count in zip("qv", rows, strict=True)
    }
    inputs = Inputs(x.T @ x, x.abs().mean(0), len(x))
    fold_C = torch.arange(columns) // 2 if fold else None
    scheme = parse_scheme(f"{name}-{bits}bit:group={group}:scale_dtype={scale_dtype}")
    if name == "gptq":
        order = {"act_group_aware": False, **order} if order.get("act_order") else order
        scheme = dataclasses.replace(scheme, static_groups=static_groups, **order)
    flag = "zero_point" if name == "awq" else "sym"
    value = not symmetric if name == "awq" else symmetric
    check(dataclasses.replace(scheme, **{flag: value}), Linears(weights, inputs, fold_C))


@pytest.mark.parametrize("shape", [(3, 64), (5, 13), (7, 33)])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("table", ["nf4", "fp4"])
def test_blocks_of_the_flattened_weight(table, double_quant, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    scheme = parse_scheme(f"bnb-{table}:blocksize=32:double_quant={double_quant}")
    check(scheme, Linears({"w": weight}))


def test_the_index_of_groups_says_where_each_column_is():
    spec = "gptq-4bit:group=16:act_order=true:act_group_aware=false"
    linears = example()
    stored = parse_scheme(spec).quantize(linears).stored["attn.q_proj"]
    largest_first = torch.argsort(linears.inputs.gram_CC.diagonal(), descending=True)
    expected = torch.empty(160, dtype=torch.int32)
    expected[largest_first] = torch.arange(160, dtype=torch.int32) // 16
    assert torch.equal(stored.group_of_C, expected)


@every_plain_scheme
def test_what_is_kept_of_a_scheme_is_read_as_the_weights_that_were_measured(scheme, tmp_path):
    linears = example(torch.bfloat16)
    quantized = scheme.quantize(linears)
    WeightKeeper({scheme.spec: tmp_path}, None).observe(scheme, linears, quantized)
    ((_, read),) = kept_groups(tmp_path)
    assert read.bits == quantized.bits
    for name, weight_RC in filled(quantized.weights.items()):
        assert torch.equal(read.weights[name], weight_RC)
        assert read.stored[name].nbits == quantized.stored[name].nbits
