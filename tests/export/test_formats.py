"""Files mean the weights by the letter of their format, and what does not fit is refused."""

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.linears import FoldSource, IntegerCodes
from qaudit.core.registry import parse_scheme
from qaudit.errors import SchemeError, SourceError
from qaudit.export.packed import divided, divided_codes, refuse_rounded, scale_of_rows
from qaudit.formats.arithmetic import pack
from qaudit.formats.packing import format_named
from tests.support.filled import filled
from tests.support.formats import stored_of, weight


def integers(words, bits, count):
    """Read codes from words that follow one another, as one long integer."""
    long = sum((int(word) & 0xFFFFFFFF) << (32 * k) for k, word in enumerate(words))
    return [(long >> (bits * k)) & (2**bits - 1) for k in range(count)]


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_files_mean_the_weights_by_their_format(bits, symmetric):
    scheme = f"rtn-{bits}bit:group=32:sym={str(symmetric).lower()}"
    stored = stored_of(scheme, weight(3, 32, 64))
    form = format_named("gptq", parse_scheme(scheme))
    file, config = form.pack("a", stored), form.config((), symmetric=symmetric)
    assert config["checkpoint_format"] == ("gptq" if symmetric else "gptq_v2")
    plus = 1 if symmetric else 0  # what version 1 adds to a stored zero
    zeros = [integers(words, bits, 32) for words in file["a.qzeros"]]
    dense_RC = stored.decode()
    for row, words in enumerate(file["a.qweight"].T):
        for column, code in enumerate(integers(words, bits, 64)):
            group = int(file["a.g_idx"][column])
            scale = float(file["a.scales"][group, row])
            expected = (code - zeros[group][row] - plus) * scale
            assert float(dense_RC[row, column]) == expected


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_files_mean_the_weights_by_their_format(symmetric):
    scheme = f"rtn-4bit:group=32:sym={str(symmetric).lower()}"
    stored = stored_of(scheme, weight(4, 16, 64))
    file = format_named("awq", parse_scheme(scheme)).pack("a", stored)
    place = {row: 4 * k for k, row in enumerate((0, 2, 4, 6, 1, 3, 5, 7))}  # shift of its nibble
    dense_RC = stored.decode()
    for row in range(16):
        for column in range(64):
            code = (int(file["a.qweight"][column, row // 8]) >> place[row % 8]) & 15
            zero = (int(file["a.qzeros"][column // 32, row // 8]) >> place[row % 8]) & 15
            scale = float(file["a.scales"][column // 32, row])
            assert float(dense_RC[row, column]) == (code - zero) * scale


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_files_are_what_bitsandbytes_saves(kind, nested):
    scheme = "bnb-int8" if kind == "int8" else f"bnb-{kind}:double_quant={str(nested).lower()}"
    linear = (
        Linear8bitLt(96, 64, bias=False, has_fp16_weights=False)
        if kind == "int8"
        else Linear4bit(96, 64, bias=False, quant_type=kind, compress_statistics=nested)
    )
    linear.load_state_dict({"weight": weight()})
    theirs = linear.to("cpu").state_dict()
    ours = format_named("bnb", parse_scheme(scheme)).pack("a", stored_of(scheme, weight()))
    assert {f"a.{name}" for name in theirs} == set(ours)
    for name, tensor in filled(theirs.items()):
        assert torch.equal(ours[f"a.{name}"].flatten(), tensor.flatten()), name


def test_what_does_not_fit_is_refused():
    for form, scheme, shape, sentence, hint in (
        ("gptq", "rtn-5bit:group=32", (64, 96), "3, 4, 8 bits", "compressed-tensors"),
        ("gptq", "rtn-4bit:group=32", (48, 96), "multiples of 32", "compressed-tensors"),
        ("awq", "rtn-8bit:group=32", (64, 96), "have 4 bits", "compressed-tensors"),
        ("awq", "rtn-4bit:group=32", (60, 96), "multiples of 8", "compressed-tensors"),
        ("gptq", "rtn-4bit:group=64", (64, 96), "do not fill the 96 columns", "group=32"),
        ("gptq", "int8", (64, 128), "what its linears read", "`compressed-tensors`"),
        ("awq", "fp8", (64, 128), "what its linears read", "`compressed-tensors`"),
        ("bnb", "nvfp4", (64, 128), "no codes of bitsandbytes", "`compressed-tensors`"),
        ("gptq", "mxfp4a16", (64, 128), "not store integer codes", "`compressed-tensors`"),
        ("compressed-tensors", "fp8:blocks=true", (64, 128), "blocks of 128 x 128", "fp8"),
        ("compressed-tensors", "fp8:blocks=true", (128, 96), "blocks of 128 x 128", "fp8"),
        ("compressed-tensors", "nvfp4", (64, 100), "blocks of 16 columns", "fp8"),
        ("compressed-tensors", "mxfp4a16", (64, 48), "blocks of 32 columns", "fp8"),
        ("compressed-tensors", "mxfp4:rule=floor", (64, 96), "another rule", "rule=even"),
        ("compressed-tensors", "mxfp4:rotate=true", (64, 128), "rotates", "without rotate"),
        ("compressed-tensors", "nvfp4:rotate=true", (64, 128), "rotates", "without rotate"),
        ("compressed-tensors", "mr-gptq:act=16", (64, 128), "rotates", "without rotate"),
        ("compressed-tensors", "mr-gptq:format=mxfp4", (64, 128), "rotates", "without rotate"),
        ("compressed-tensors", "gguf-q4_0", (64, 128), "not store integer codes", "`gguf`"),
        ("gptq", "gptq-4bit:group=32:act_order=true:act_group_aware=false", (64, 96),
         "mixes the columns", "static_groups=true"),
        ("gguf", "rtn-3bit:group=32", (64, 128), "no type of GGUF", "gguf-q4_k"),
        ("gguf", "rtn-4bit:group=32:sym=false", (64, 128), "no type of GGUF", "gguf-q4_k"),
        ("gguf", "rtn-4bit:group=16", (64, 128), "no type of GGUF", "group=32"),
        ("gguf", "nvfp4a16", (64, 128), "not store integer codes", "`compressed-tensors`"),
        ("compressed-tensors", "quarot-rtn-8bit:rotate=false:act=8", (64, 128), "read", "int8"),
        ("mlx", "rtn-7bit:group=32", (64, 96), "has 7", "`compressed-tensors`"),
        ("mlx", "rtn-4bit:group=-1", (64, 96), "has groups of -1", "group=64"),
        ("mlx", "fp8", (64, 128), "what its linears read", "`compressed-tensors`"),
        ("bnb", "rtn-4bit", (64, 128), "no codes of bitsandbytes", "bnb-nf4"),
        ("gptq", "bnb-nf4", (64, 128), "not store integer codes", "`bnb`"),
        ("awq", "rtn-4bit:group=32:scale_dtype=float32", (64, 96), "scales in float32", "bf16"),
        ("gptq", "quarot-rtn-4bit", (64, 96), "changes what its linears read", "export"),
        ("gptq", "ostquant-4bit:act=16", (64, 96), "changes what its linears read", "export"),
        ("awq", "duquant-4bit:act=16", (64, 96), "changes what its linears read", "export"),
        ("compressed-tensors", "quarot-rtn-4bit:act=16", (64, 96), "changes what its", "export"),
    ):  # fmt: skip
        packing = format_named(form, parse_scheme(scheme))
        with pytest.raises(SchemeError, match=sentence) as refusal:
            packing.pack("a", stored_of(scheme, weight(0, *shape)))
        assert hint in refusal.value.hint


def test_scales_that_are_no_numbers_or_would_be_rounded_are_refused():
    scheme = parse_scheme("rtn-4bit:group=32")
    stored = stored_of("rtn-4bit:group=32", weight())
    assert isinstance(stored, IntegerCodes)
    stored.scales_RG[0, 0] = float("nan")
    with pytest.raises(SourceError, match="zero or not finite"):
        format_named("gptq", scheme).pack("a", stored)
    source = FoldSource("norm", is_norm=True)
    with pytest.raises(SchemeError, match="a file would round") as refusal:
        scale_of_rows(AWQ, source, torch.arange(2), torch.tensor([2.0, 3.0]))
    assert "exact_fold=true" in refusal.value.hint
    ones = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(SchemeError, match=r"`norm\.weight` is stored in bfloat16") as refusal:
        divided("norm.weight", ones / 128, torch.full((2,), 8.0), one_plus=True)  # 1.0078 / 8 - 1
    assert "scales no columns" in refusal.value.hint
    with pytest.raises(SchemeError, match="no scales that could take"):
        divided_codes("v_proj", parse_scheme("fp8").quantize, torch.ones(2))  # type: ignore[arg-type]
    refuse_rounded(AWQ)  # parameters alone refuse most
    refuse_rounded(parse_scheme("gptq-4bit"))
    for spec in ("awq-4bit", "smoothquant", "awq-4bit:unfolded=true:exact_fold=true"):
        with pytest.raises(SchemeError):
            refuse_rounded(parse_scheme(spec))


BITS = st.integers(2, 8)


def codes_of(bits, rows, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, (rows, count), dtype=torch.uint8, generator=generator)


@given(BITS, st.integers(1, 5), st.integers(1, 100), st.integers(0, 99))
def test_a_row_of_words_is_one_long_integer(bits, rows, count, seed):
    codes_RN = codes_of(bits, rows, count, seed)
    for codes_N, words_W in filled(zip(codes_RN, pack(codes_RN, bits), strict=True)):
        integer = sum(int(code) << (k * bits) for k, code in enumerate(codes_N))
        words = [int(word) & 0xFFFFFFFF for word in words_W]
        assert sum(word << (32 * k) for k, word in enumerate(words)) == integer
        assert len(words) == -(-count * bits // 32)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [32, 77, 96])
def test_compressed_tensors_packs_alike(bits, count):
    codes_RN = codes_of(bits, 6, count)
    signed_RN = (codes_RN.int() - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(pack(codes_RN, bits), pack_to_int32(signed_RN, bits))


AWQ = parse_scheme("awq-4bit:exact_fold=true")


@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=8),
    st.sampled_from(["bfloat16", "float16", "float32"]),
)
def test_powers_of_two_divide_every_type_exactly(exponents, dtype):
    tensor_R = torch.linspace(-2, 3, len(exponents) + 2).to(getattr(torch, dtype))
    scale_R = torch.tensor([2.0**one for one in exponents])
    held_R = divided("norm.weight", tensor_R, scale_R)
    assert held_R.dtype == tensor_R.dtype
    assert torch.equal(held_R[: len(exponents)].double() * scale_R, tensor_R.double()[:-2])
    assert torch.equal(held_R[-2:], tensor_R[-2:])  # rows behind those that are scaled


def test_query_heads_divide_the_rows_that_they_share():
    source = FoldSource("v_proj", is_norm=False, offset=1)
    scale_R = scale_of_rows(AWQ, source, torch.tensor([0, 1, 0, 1]), torch.tensor([2.0, 4, 2, 4]))
    assert scale_R.tolist() == [1, 2, 4]
