"""Blocks of GGUF by their definitions, by the `gguf` package, and by hashes of ggml's own bytes."""

from __future__ import annotations

import hashlib
import math

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

F32 = np.float32
KINDS = list(TYPES)


def q8_0(block):
    d = F32(max(abs(block))) / F32(127)
    inverse = F32(0) if d == 0 else F32(1) / d
    steps = [F32(v) * inverse for v in block]
    return np.float16(d), [int(np.sign(s) * np.floor(abs(s) + F32(0.5))) for s in steps]


def q4_0(block):
    largest = max(block, key=abs)
    d = F32(largest) / F32(-8)
    inverse = F32(0) if d == 0 else F32(1) / d
    codes = [min(15, max(0, int(F32(v) * inverse + F32(8.5)))) - 8 for v in block]
    return np.float16(d), codes


@pytest.mark.parametrize(("name", "slowly"), [("q8_0", q8_0), ("q4_0", q4_0)])
@pytest.mark.parametrize("magnitude", [1e-4, 0.02, 30.0])
def test_block_by_block(name, slowly, magnitude):
    weight = magnitude * torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    weight[2, :40] = 0
    decoded = parse_scheme(f"gguf-{name}").quantize(Linears({"w": weight})).weights["w"]
    for row, rounded in zip(weight.numpy(), decoded.numpy(), strict=True):
        for start in range(0, 96, 32):
            d, codes = slowly(row[start : start + 32])
            assert rounded[start : start + 32].tolist() == [float(F32(d) * F32(c)) for c in codes]


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
    values = weight()[:12]  # one of each sort
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
def test_columns_that_256_does_not_divide_get_the_type_of_llama_cpp_and_a_note(
    name, kind, instead, suffix
):
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
