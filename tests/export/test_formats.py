"""Every format gives back what was packed, and writes what bitsandbytes itself saves."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.linears import Inputs, Linears, Quantized
from qaudit.core.registry import parse_scheme
from qaudit.core.stored import IntegerCodes, StoredWeight
from qaudit.errors import QauditError, SchemeError, SourceError
from qaudit.formats.packing import Format
from qaudit.formats.reading import read_linear
from qaudit.formats.registry import format_named, formats

CASES = [
    *(("compressed-tensors", f"rtn-{bits}bit:group=32") for bits in range(2, 9)),
    *(("compressed-tensors", f"rtn-{bits}bit:group=-1:sym=false") for bits in range(2, 9)),
    *(("gptq", f"rtn-{bits}bit:group=32") for bits in (3, 4, 8)),
    *(("gptq", f"rtn-{bits}bit:group=-1:sym=false") for bits in (3, 4, 8)),
    ("awq", "rtn-4bit:group=32"),
    ("awq", "rtn-4bit:group=-1:sym=false"),
    *(("mlx", f"rtn-{bits}bit:group=32") for bits in (2, 3, 4, 5, 6, 8)),
    *(("mlx", f"rtn-{bits}bit:group=32:sym=false") for bits in (2, 3, 4, 5, 6, 8)),
    ("bnb", "bnb-nf4"),
    ("bnb", "bnb-fp4:blocksize=128"),
    ("bnb", "bnb-nf4:double_quant=true"),
    ("bnb", "bnb-int8"),
    *(("compressed-tensors", scheme) for scheme in ("fp8", "fp8:blocks=true", "int8")),
    *(("compressed-tensors", scheme) for scheme in ("nvfp4a16", "nvfp4", "mxfp4a16", "mxfp4")),
    ("compressed-tensors", "mxfp4a16:rule=floor"),
]
SIDES = {"fp8:blocks=true": (256, 128)}  # of full blocks


def weight(seed: int = 0, rows: int = 64, columns: int = 96) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) / 50


def quantized_by(scheme: str, weight_RC: torch.Tensor) -> Quantized:
    columns = weight_RC.shape[1]
    x_CC, ones_C = torch.eye(columns), torch.ones(columns)
    inputs = Inputs(x_CC, ones_C, columns, ones_C, sample_TC=x_CC)
    return parse_scheme(scheme).quantize(Linears({"w": weight_RC}, inputs))


TRANSFORMING = ("quarot-rtn", "duquant", "ostquant")
"""Schemes whose codes are of weights in another basis, even where no activation is rounded."""


def stored_of(scheme: str, weight_RC: torch.Tensor) -> StoredWeight:
    return quantized_by(scheme, weight_RC).stored["w"]


def read_back(form: Format, tensors: dict[str, torch.Tensor], scheme: str) -> torch.Tensor:
    """Return the weight of `a` as the reader of shipped files decodes it."""
    config = form.config(("lm_head",), symmetric="sym=false" not in scheme)
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, f"{folder}/model.safetensors")
        return read_linear(WeightFolder(Path(folder)), form.reader, config, "a")


@pytest.mark.parametrize(("form", "scheme"), CASES)
def test_what_was_packed_is_read_back_bit_for_bit(form: str, scheme: str) -> None:
    form_of_it = format_named(form, parse_scheme(scheme))
    quantized = quantized_by(scheme, weight(0, *SIDES.get(scheme, (64, 96))))
    tensors = form_of_it.pack("a", quantized.stored["w"])
    assert all(name.startswith("a.") and one.is_contiguous() for name, one in tensors.items())
    assert torch.equal(read_back(form_of_it, tensors, scheme), quantized.weights["w"])


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", "awq", "mlx"])
def test_scales_may_be_negative(form: str) -> None:
    """AutoRound turns the sign of a symmetric group whose largest weight is positive."""
    scheme = parse_scheme("autoround-4bit:group=32")
    stored = stored_of("rtn-4bit:group=32", weight())
    assert isinstance(stored, IntegerCodes)
    signs_RG = torch.where(torch.arange(stored.scales_RG.numel()) % 2 == 0, -1, 1)
    turned = replace(stored, scales_RG=stored.scales_RG * signs_RG.view_as(stored.scales_RG))
    written = format_named(form, scheme)
    assert torch.equal(read_back(written, written.pack("a", turned), scheme.spec), turned.decode())


def integers(words: torch.Tensor, bits: int, count: int) -> list[int]:
    """Read codes from words that follow one another, as one long integer."""
    long = sum((int(word) & 0xFFFFFFFF) << (32 * k) for k, word in enumerate(words))
    return [(long >> (bits * k)) & (2**bits - 1) for k in range(count)]


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_files_mean_the_weights_by_the_letter_of_the_format(
    bits: int, symmetric: bool
) -> None:
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
def test_awq_files_mean_the_weights_by_the_letter_of_the_format(symmetric: bool) -> None:
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


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_four_bits_are_what_bitsandbytes_saves(kind: str, nested: bool) -> None:
    scheme = f"bnb-{kind}:double_quant={str(nested).lower()}"
    linear = Linear4bit(96, 64, bias=False, quant_type=kind, compress_statistics=nested)
    linear.load_state_dict({"weight": weight()})
    theirs = linear.to("cpu").state_dict()
    ours = format_named("bnb", parse_scheme(scheme)).pack("a", stored_of(scheme, weight()))
    assert {f"a.{name}" for name in theirs} == set(ours)
    for name, tensor in theirs.items():
        assert torch.equal(ours[f"a.{name}"].flatten(), tensor.flatten()), name


def test_int8_is_what_bitsandbytes_saves() -> None:
    linear = Linear8bitLt(96, 64, bias=False, has_fp16_weights=False)
    linear.load_state_dict({"weight": weight()})
    theirs = linear.to("cpu").state_dict()
    ours = format_named("bnb", parse_scheme("bnb-int8")).pack("a", stored_of("bnb-int8", weight()))
    assert {f"a.{name}" for name in theirs} == set(ours)
    for name, tensor in theirs.items():
        assert torch.equal(ours[f"a.{name}"], tensor), name


@pytest.mark.parametrize(
    ("form", "scheme", "shape", "sentence", "hint"),
    [
        ("gptq", "rtn-5bit:group=32", (64, 96), "3, 4 or 8 bits", "compressed-tensors"),
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
        ("gguf", "rtn-3bit:group=32", (64, 128), "no type of GGUF", "gguf-q4_k"),
        ("gguf", "rtn-4bit:group=32:sym=false", (64, 128), "no type of GGUF", "gguf-q4_k"),
        ("gguf", "rtn-4bit:group=16", (64, 128), "no type of GGUF", "group=32"),
        ("gguf", "nvfp4a16", (64, 128), "not store integer codes", "`compressed-tensors`"),
        ("compressed-tensors", "quarot-rtn-8bit:rotate=false:act=8", (64, 128), "read", "int8"),
        ("mlx", "rtn-7bit:group=32", (64, 96), "has 7 in groups of 32", "`compressed-tensors`"),
        ("mlx", "rtn-4bit:group=-1", (64, 96), "in groups of -1", "group=64"),
        ("mlx", "fp8", (64, 128), "what its linears read", "`compressed-tensors`"),
        ("bnb", "rtn-4bit", (64, 128), "no codes of bitsandbytes", "bnb-nf4"),
        ("gptq", "bnb-nf4", (64, 128), "not store integer codes", "`bnb`"),
        ("awq", "rtn-4bit:group=32:scale_dtype=float32", (64, 96), "scales in float32", "bf16"),
    ],
)
def test_what_does_not_fit_is_refused(
    form: str, scheme: str, shape: tuple[int, int], sentence: str, hint: str
) -> None:
    packing = format_named(form, parse_scheme(scheme))
    with pytest.raises(SchemeError, match=sentence) as refusal:
        packing.pack("a", stored_of(scheme, weight(0, *shape)))
    assert hint in refusal.value.hint


def test_scales_that_are_no_numbers_are_refused() -> None:
    scheme = parse_scheme("rtn-4bit:group=32")
    stored = stored_of("rtn-4bit:group=32", weight())
    assert isinstance(stored, IntegerCodes)
    stored.scales_RG[0, 0] = float("nan")
    with pytest.raises(SourceError, match="zero or not finite"):
        format_named("gptq", scheme).pack("a", stored)


@given(st.sampled_from(CASES), st.data())
def test_damaged_tensors_are_refused_in_words(case: tuple[str, str], data: st.DataObject) -> None:
    form, scheme = case
    packing = format_named(form, parse_scheme(scheme))
    tensors = packing.pack("a", stored_of(scheme, weight(0, *SIDES.get(scheme, (64, 96)))))
    name = data.draw(st.sampled_from(sorted(tensors)))
    size = data.draw(st.integers(0, max(0, len(tensors[name].flatten()) - 1)))
    tensors[name] = tensors[name].flatten()[:size].reshape(size, *[1] * (tensors[name].dim() - 1))
    try:
        read_back(packing, tensors, scheme)
    except QauditError as error:
        assert error.hint


def test_a_format_that_is_not_written_is_refused() -> None:
    for name in ("exl2", ""):
        with pytest.raises(QauditError, match=f"`{name}` is not") as refusal:
            format_named(name, parse_scheme("rtn-4bit"))
        assert all(known in refusal.value.hint for known in formats())


@pytest.mark.parametrize("form", formats())
def test_a_cache_is_no_part_of_a_file(form: str) -> None:
    with pytest.raises(SchemeError, match="cached keys and values") as refusal:
        format_named(form, parse_scheme("rtn-4bit:group=32:kv=int8"))
    assert "export rtn-4bit:group=32," in refusal.value.hint


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", "awq"])
@pytest.mark.parametrize(
    "scheme",
    [
        "int8",
        "quarot-rtn-4bit",
        "quarot-rtn-4bit:act=16",
        "duquant-4bit:act=16",
        "ostquant-4bit:act=16",
    ],
)
def test_codes_of_changed_inputs_are_refused(form: str, scheme: str) -> None:
    packing, stored = format_named(form, parse_scheme(scheme)), stored_of(scheme, weight())
    if (form, scheme) == ("compressed-tensors", "int8"):
        return  # whose runtimes round activations as it does
    with pytest.raises(SchemeError, match="changes what its linears read"):
        packing.pack("a", stored)
