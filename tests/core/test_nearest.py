"""Rounding to nearest and HQQ by their formulas, bitsandbytes and GGUF by their libraries."""

import hashlib
import logging
import math
from itertools import product

import bitsandbytes
import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.gguf import TYPES, GgufBlocks, pack
from qaudit.core.linears import Inputs, Linears
from qaudit.core.registry import parse_scheme
from qaudit.core.schemes.gguf import fallback, type_in_mix
from qaudit.errors import SourceError
from tests.support.filled import filled
from tests.support.gguf import HASHES, importance, weight
from tests.support.reference.plain_gptq import find_scale


def plain_rtn(weight_RC, bits, group, symmetric, scale_dtype):
    """Round group by group, in the arithmetic of the weight's dtype."""
    result, columns = np.zeros_like(weight_RC), weight_RC.shape[1]
    for start in range(0, columns, columns if group == -1 else group):
        part = slice(start, columns if group == -1 else start + group)
        found = find_scale(weight_RC[:, part], bits, symmetric, scale_dtype)
        scale, zero = (one[:, None] for one in found)
        codes = np.clip(np.round(weight_RC[:, part] / scale) + zero, 0, 2**bits - 1)
        result[:, part] = (codes - zero) * scale
    return result


def rounded(weight, bits, group, symmetric, scale_dtype="float32"):
    options = f"group={group}:sym={symmetric}:scale_dtype={scale_dtype}"
    scheme = parse_scheme(f"rtn-{bits}bit:{options}")
    return scheme.quantize(Linears({"w": torch.from_numpy(weight)})).weights["w"].numpy()


@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.integers(2, 8),
    group=st.sampled_from([-1, 1, 5, 8, 64]),
    symmetric=st.booleans(),
    kind=st.sampled_from(["normal", "positive", "negative", "sparse"]),
    dtype=st.sampled_from([np.float32, np.float64]),
    scale_dtype=st.sampled_from(["float32", "bf16"]),
)
def test_equals_rounding_group_by_group(seed, bits, group, symmetric, kind, dtype, scale_dtype):
    weight = np.random.default_rng(seed).standard_normal((3, 13))
    weight = {
        "normal": weight,
        "positive": np.abs(weight),
        "negative": -np.abs(weight),
        "sparse": np.where(weight > 1, weight, 0),
    }[kind].astype(dtype)
    options = bits, group, symmetric, scale_dtype
    np.testing.assert_array_equal(rounded(weight, *options), plain_rtn(weight, *options))


def test_half_precision_is_rounded_in_single_and_the_smallest_numbers_divide_by_no_zero():
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scheme = parse_scheme("rtn-4bit:group=32")
    found = scheme.quantize(Linears({"w": weight})).weights["w"]
    expected = scheme.quantize(Linears({"w": weight.float()})).weights["w"].bfloat16()
    assert torch.equal(found, expected)
    tiny = rounded(np.array([[1e-45, -1e-45, 0.0, 0.0]], dtype=np.float32), 8, -1, True)
    assert np.isfinite(tiny).all()
    assert np.abs(tiny).max() <= 3e-45


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_scale_in_bfloat16_is_at_least_2_to_the_minus_17(symmetric):
    scheme = parse_scheme(f"rtn-8bit:group=4:sym={symmetric}:scale_dtype=bf16")
    weight = torch.tensor([[2.0**-17, -(2.0**-18) * 1.01, 1e-30, 0.0, 1.0, -1.0, 0.0, 0.5]])
    quantized = scheme.quantize(Linears({"w": weight}))
    scales_RG = quantized.stored["w"].scales_RG
    assert scales_RG[0, 0] == 2.0**-17
    assert torch.equal(scales_RG.half().float(), scales_RG.float())
    assert quantized.weights["w"][0, :4].tolist() == [2.0**-17, -(2.0**-17), 0.0, 0.0]


def test_a_negative_group_keeps_its_zero_point_when_its_scale_is_rounded_down():
    # 255.5 steps of the rounded scale: the zero point would be 256 and not fit 8 bits.
    scale = 1 + 2.0**-8  # half way between two values of bfloat16, to the even one below
    weight = torch.tensor([[-255 * scale, -scale, 0.0]])
    stored = parse_scheme("rtn-8bit:sym=false:scale_dtype=bf16").quantize(Linears({"w": weight}))
    assert stored.stored["w"].zeros_RG.tolist() == [[255]]
    assert stored.stored["w"].scales_RG.tolist() == [[1.0]]
    assert stored.weights["w"].tolist() == [[-255.0, -1.0, 0.0]]


def reference(weight, bits, group):
    """Return codes, scales and zero points, one (codes, scale, zero) for each group."""
    rows, columns = weight.shape
    group = columns if group == -1 else group
    groups = [(r, slice(c, c + group)) for r in range(rows) for c in range(0, columns, group)]
    scales, zeros = [], []
    for r, part in groups:
        values = weight[r, part]
        extent = values.max() - values.min()
        scales.append(1.0 if extent <= 1e-4 else max(extent / (2**bits - 1), 1 / 2e4))
        zero = -values.min() / scales[-1]
        zeros.append(np.round(zero) if bits == 4 else zero)

    def codes_of(k):
        values = weight[groups[k]]
        return np.clip(np.round(values / scales[k] + zeros[k]), 0, 2**bits - 1)

    best = np.inf
    for _ in range(20):
        total = 0.0
        for k, place in enumerate(groups):
            codes = codes_of(k)
            x = weight[place] - (codes - zeros[k]) * scales[k]
            total += np.abs(x).sum()
            with np.errstate(divide="ignore"):
                e = np.sign(x) * np.maximum(np.abs(x) - np.abs(x) ** (0.7 - 1) / 10, 0)
            zeros[k] = np.mean(codes - (weight[place] - e) / scales[k])
        if total / weight.size >= best:
            break
        best = total / weight.size
    dense = np.zeros_like(weight)
    for k, place in enumerate(groups):
        dense[place] = (codes_of(k) - zeros[k]) * scales[k]
    return dense, np.array(scales).reshape(rows, -1), np.array(zeros).reshape(rows, -1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("columns", "group", "size"), [(160, 64, 1), (96, -1, 20), (40, 16, 9)])
def test_codes_scales_and_zeros_are_the_published_ones(bits, columns, group, size):
    # Heavy tails, as in trained layers, are what the power of 0.7 is for; errors of large weights
    # do not all vanish.
    weight = size * 0.05 * np.random.default_rng(bits).standard_t(4, (12, columns))
    scheme = parse_scheme(f"hqq-{bits}bit:group={group}:scale_dtype=float32")
    quantized = scheme.quantize(Linears({"w": torch.from_numpy(weight)}))
    dense, scales, zeros = reference(weight, bits, group)
    stored = quantized.stored["w"]
    # Both in float64, in sums of another order; no code is that near to a tie in these weights.
    np.testing.assert_allclose(stored.scales_RG.numpy(), scales, rtol=1e-12)
    np.testing.assert_allclose(stored.zeros_RG.numpy(), zeros, rtol=0, atol=1e-9)
    np.testing.assert_allclose(quantized.weights["w"].numpy(), dense, rtol=0, atol=1e-10)


# ------------------------------------------------------------------------------------ bitsandbytes


WHOLE = [(16, 64), (3, 128), (7, 320)]  # rows of whole blocks
CUT = [(24, 96), (5, 100), (3, 34), (2, 160)]  # blocks that run over the ends of rows
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (0.05 * torch.randn(shape, generator=generator)).to(dtype)


def quantized(spec, values):
    return parse_scheme(spec).quantize(Linears({"w": values}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WHOLE)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("table", ["nf4", "fp4"])
def test_four_bits_equal_linear4bit_bit_for_bit(table, nested, shape, dtype):
    values = normal(shape, dtype)
    found = quantized(f"bnb-{table}:double_quant={nested}", values).weights["w"]
    options = {"compress_statistics": nested, "quant_type": table}
    module = bitsandbytes.nn.Linear4bit(*values.T.shape, bias=False, **options)
    module.weight = bitsandbytes.nn.Params4bit(values.clone(), module=module, **options)
    stored = module.to("cpu").weight
    expected = bitsandbytes.functional.dequantize_4bit(stored.data, stored.quant_state)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [*CUT, (7, 13), (1, 1), (3, 65)])  # and odd numbers of weights
@pytest.mark.parametrize("table", ["nf4", "fp4"])
def test_blocks_that_run_over_the_ends_of_rows_keep_their_own_maximum(table, shape):
    # Not against `dequantize_4bit` of the matrix, which on AVX512 mixes up the maxima of such
    # blocks, but against the codes and maxima that bitsandbytes itself stores.
    values = normal(shape)
    packed, state = bitsandbytes.functional.quantize_4bit(values, blocksize=64, quant_type=table)
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten().long()
    codes = codes[: values.numel()]
    maxima = state.absmax.repeat_interleave(64)[: len(codes)]
    expected = (state.code[codes] * maxima).reshape(shape)
    assert torch.equal(quantized(f"bnb-{table}", values).weights["w"], expected)


def module_int8(values, threshold):
    own = {"has_fp16_weights": False}
    module = bitsandbytes.nn.Linear8bitLt(*values.T.shape, False, threshold=threshold, **own)
    module.weight = bitsandbytes.nn.Int8Params(values.clone(), requires_grad=False, **own)
    return module.to("cpu").eval()


@pytest.mark.parametrize(
    ("shape", "dtype"), [*product(WHOLE + CUT, DTYPES[:1]), *product(WHOLE[:1], DTYPES[1:])]
)
@pytest.mark.parametrize("threshold", [6.0, 0.0, 1.5])
def test_int8_forward_equals_linear8bitlt_bit_for_bit(shape, threshold, dtype):
    values = normal(shape, dtype)
    x = torch.randn(2, 9, shape[1], generator=torch.Generator().manual_seed(4)).to(dtype)
    x[0, 3, 5], x[1, 1, 11] = 40.0, -7.5
    result = quantized(f"bnb-int8:threshold={threshold}", values)
    forward = result.forwards["w"]
    with torch.no_grad():
        expected = module_int8(values, threshold)(x.clone())
        assert torch.equal(forward(x), expected)
        # A forward holds no state: another batch between changes nothing.
        forward(torch.ones(4, shape[1], dtype=dtype))
        assert torch.equal(forward(x), expected)


def test_int8_notes_outliers_of_a_batch_and_refuses_weights_beyond_float16_by_name():
    values = normal((4, 64))
    assert any("per batch" in note for note in quantized("bnb-int8", values).notes)
    assert not quantized("bnb-int8:threshold=0", values).notes
    values[0, 0] = 1e6
    with pytest.raises(SourceError, match="`w` holds numbers too large for float16"):
        quantized("bnb-int8", values)


def test_only_the_one_warning_per_matmul_is_silenced(caplog):
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    forward = quantized("bnb-int8", normal((4, 64))).forwards["w"]
    with caplog.at_level(logging.WARNING):
        forward(torch.ones(2, 64))
        logger.warning("something else")
        module_int8(normal((4, 64)), 6.0)(torch.ones(2, 64))
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "something else"
    assert messages[1].startswith("MatMul8bitLt: inputs will be cast")
    assert not logger.filters


# -------------------------------------------------------------------------------------------- GGUF


KINDS = list(TYPES)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_ggml(kind, weighted):
    packed = pack(kind, weight(), importance() if weighted else None)
    assert hashlib.sha256(packed.numpy().tobytes()).hexdigest()[:16] == HASHES[kind, weighted]


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_block_decodes_to_what_the_gguf_package_reads(kind, seed):
    packed = np.random.default_rng(seed).integers(0, 256, (3, 2 * TYPES[kind].nbytes), np.uint8)
    stored = GgufBlocks(torch.from_numpy(packed), kind)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(stored.decode().numpy(), theirs, equal_nan=True)
    assert stored.nbits == 8 * packed.size


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_packed_by_themselves_in_as_many_bytes_as_ggml_has(kind):
    columns, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert (TYPES[kind].columns, TYPES[kind].nbytes) == (columns, nbytes)
    assert pack(kind, weight()).shape == (len(weight()), weight().shape[1] // columns * nbytes)
    values = weight()[:12:3]  # of several sorts
    rows = [pack(kind, row[None], importance()) for row in values]
    assert torch.equal(pack(kind, values, importance()), torch.cat(rows))


def linears(columns=512, block=0, blocks=1, tokens=7):
    generator = torch.Generator().manual_seed(0)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    weights = {name: 0.02 * torch.randn(8, columns, generator=generator) for name in names}
    x = torch.randn(tokens, columns, generator=generator)
    inputs = Inputs(x.T @ x, x.abs().mean(0), tokens)
    return Linears(weights, inputs, None, block, blocks)


@pytest.mark.parametrize("name", ["gguf-q4_0", "gguf-q3_k", "gguf-q4_k", "gguf-q5_k", "gguf-q6_k"])
def test_importance_is_the_mean_square_of_inputs(name):
    given_ = linears()
    quantized = parse_scheme(f"{name}:importance=true").quantize(given_)
    mean_square = given_.inputs.gram_CC.diagonal() / given_.inputs.tokens
    kind = name.removeprefix("gguf-").upper()
    for linear, stored in filled(quantized.stored.items()):
        assert torch.equal(stored.packed_RB, pack(kind, given_.weights[linear], mean_square))
    plain = parse_scheme(name).quantize(given_)
    assert not torch.equal(plain.weights["self_attn.q_proj"], quantized.weights["self_attn.q_proj"])


@pytest.mark.parametrize(
    ("name", "kind", "instead"),
    [
        ("gguf-q3_k", "Q3_K", "Q4_0"),
        ("gguf-q4_k", "Q4_K", "Q5_0"),
        ("gguf-q5_k", "Q5_K", "Q5_1"),
        ("gguf-q6_k", "Q6_K", "Q8_0"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ":importance=true"])
def test_columns_that_256_does_not_divide_get_llama_cpps_type_and_note(name, kind, instead, suffix):
    quantized = parse_scheme(name + suffix).quantize(linears(384))
    assert {one.kind for one in quantized.stored.values()} == {instead}
    note = f"{instead} in place of {kind} where 256 does not divide the columns, as llama.cpp"
    assert quantized.notes == (note,)
    assert quantized.bits == 3 * 8 * 384 // 32 * TYPES[instead].nbytes * 8


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q3_k", "q4_k", "q6_k", "q4_k_m", "q3_k_m"])
def test_rows_that_32_does_not_divide_and_weights_beyond_float16_are_refused_by_name(name):
    scheme = parse_scheme(f"gguf-{name}")
    with pytest.raises(SourceError, match=r"`mlp\.up` has rows of 48 columns") as refused:
        scheme.quantize(Linears({"mlp.up": torch.ones(2, 48)}))
    assert f"gguf-{name}" in refused.value.hint
    with pytest.raises(SourceError, match="are too large for `gguf-"):
        scheme.quantize(Linears({"w": torch.full((2, 256), 3e38)}))


# ------------------------------------------------------------------------------- the mixes


def test_mixes_give_more_bits_in_the_blocks_of_llama_cpp():
    # The types of a Q4_K_M file of Llama 3.1 8B, which has 32 blocks.
    more = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}
    wanted = ["Q6_K" if block in more else "Q4_K" for block in range(32)]
    first_two = ["Q5_K"] * 2 + ["Q4_K"] * 30
    for mix, role, expected in (
        ("Q4_K", "self_attn.v_proj", wanted),
        ("Q4_K", "mlp.down_proj", wanted),
        *(("Q4_K", f"self_attn.{one}_proj", ["Q4_K"] * 32) for one in "qko"),
        ("Q4_K", "mlp.up_proj", ["Q4_K"] * 32),
        ("Q3_K", "self_attn.v_proj", first_two),
        ("Q3_K", "mlp.down_proj", first_two),
        ("Q3_K", "self_attn.o_proj", ["Q4_K"] * 32),
        ("Q3_K", "mlp.gate_proj", ["Q3_K"] * 32),
    ):
        assert [type_in_mix(mix, role, block, 32) for block in range(32)] == expected
    for mix in ("Q4_K", "Q3_K"):
        assert type_in_mix(mix, "self_attn.v_proj", 11, 80, shared=True) == "Q5_K"
        assert type_in_mix(mix, "self_attn.v_proj", 11, 80) == "Q4_K"


def test_a_mix_is_packed_by_block_and_role_and_counted_and_a_linear_without_a_role_noted():
    quantized = parse_scheme("gguf-q4_k_m").quantize(linears(block=2, blocks=4))
    assert [one.kind for one in quantized.stored.values()] == ["Q4_K", "Q4_K", "Q6_K"]
    assert quantized.bits == 8 * 2 * (2 * 144 + 210) * 8
    assert not quantized.notes
    without = parse_scheme("gguf-q4_k_m").quantize(Linears({"mixer.in": torch.ones(2, 256)}))
    assert "no role for `mixer.in`" in without.notes[0]


@given(columns=st.integers(1, 4096), kind=st.sampled_from(KINDS))
def test_every_number_of_columns_has_a_type_or_none(columns, kind):
    own = fallback(kind, columns)
    if columns % 32:
        assert own is None
    else:
        assert own is not None
        assert columns % TYPES[own].columns == 0
        assert own == kind or math.gcd(columns, 256) < 256
