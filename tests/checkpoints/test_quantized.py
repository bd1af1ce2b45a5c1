"""Quantized repositories become the dense weights that their bits mean, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qaudit.errors import ConfigurationError, QauditError, SourceError
from qaudit.formats.bitsandbytes import _TABLES
from qaudit.formats.weights import QuantizedFolder, quantization_of
from tests.support import torchao
from tests.support.quantized import (
    Affine,
    awq_tensors,
    ct_config,
    ct_tensors,
    gptq_tensors,
    mlx_tensors,
    padded_words,
    write,
)

NAME = "model.layers.0.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}


def read(folder: Path) -> Tensor:
    return QuantizedFolder(folder).read(f"{NAME}.weight")


# --------------------------------------------------------------------- integers, by definition


@pytest.mark.parametrize("first", [True, False], ids=["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_is_read_in_both_versions(bits: int, first: bool, tmp_path: Path) -> None:
    one = Affine(0, 32, 96, bits, 32)
    kind = "gptq" if first else "gptq_v2"
    config = {**GPTQ, "bits": bits, "checkpoint_format": kind}
    folder = write(tmp_path, gptq_tensors(one, NAME, first=first), config)
    assert torch.equal(read(folder), one.weight())
    assert QuantizedFolder(folder).bits == bits
    assert not QuantizedFolder(folder).decoded_notes  # of activations, which it does not round


def test_a_group_may_be_wider_than_a_linear(tmp_path: Path) -> None:
    one = Affine(3, 32, 96, 4, 96)
    folder = write(tmp_path, gptq_tensors(one, NAME, first=True), {**GPTQ, "group_size": 128})
    assert torch.equal(read(folder), one.weight())


def test_gptq_columns_may_be_in_any_order_of_groups(tmp_path: Path) -> None:
    one = Affine(1, 32, 96, 4, 32)
    one.group_of_C = one.group_of_C[torch.randperm(96, generator=torch.Generator().manual_seed(2))]
    folder = write(tmp_path, gptq_tensors(one, NAME, first=True), {**GPTQ, "desc_act": True})
    assert torch.equal(read(folder), one.weight())


@pytest.mark.parametrize(
    ("file", "config"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        ("config.json", {"quantization_config": GPTQ}),
    ],
)
def test_old_gptq_has_a_file_of_its_own_and_no_index(
    file: str, config: dict[str, Any], tmp_path: Path
) -> None:
    one = Affine(3, 32, 64, 4, 32)
    one.zeros_RG.fill_(8)
    write(tmp_path, gptq_tensors(one, NAME, first=True, index=False), None)
    (tmp_path / file).write_text(json.dumps(config))
    assert torch.equal(read(tmp_path), one.weight())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bits": 8}, r"`quantize_config\.json` has `bits: 8`, and `config\.json` `bits: 4`"),
        ({"group_size": 64}, "has `group_size: 64`"),
        ({"desc_act": True}, "has `desc_act: True`"),
        ({"checkpoint_format": "gptq_v2"}, "has `checkpoint_format: gptq_v2`"),
        ({"sym": True}, "has `sym: True`"),
    ],
)
def test_two_configurations_of_gptq_that_differ_are_refused(
    change: dict[str, Any], match: str, tmp_path: Path
) -> None:
    """Of these files GPTQModel reads `quantize_config.json`, and vLLM `config.json`."""
    one = Affine(3, 32, 96, 4, 32)
    config = {**GPTQ, "sym": False, "checkpoint_format": "gptq"}
    folder = write(tmp_path, gptq_tensors(one, NAME, first=True), config)
    (tmp_path / "quantize_config.json").write_text(json.dumps(config))
    assert torch.equal(read(folder), one.weight())
    (tmp_path / "quantize_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigurationError, match=match):
        read(folder)


def test_two_configurations_of_awq_have_other_names_for_the_same_keys(tmp_path: Path) -> None:
    one = Affine(4, 32, 96, 4, 32)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    folder = write(tmp_path, awq_tensors(one, NAME), {**config, "version": "gemm"})
    older = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(older))
    assert torch.equal(read(folder), one.weight())
    (tmp_path / "quant_config.json").write_text(json.dumps({**older, "q_group_size": 64}))
    with pytest.raises(ConfigurationError, match=r"`quant_config\.json` has `group_size: 64`"):
        read(folder)


def test_awq_is_read(tmp_path: Path) -> None:
    one = Affine(4, 32, 96, 4, 32)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    folder = write(tmp_path, awq_tensors(one, NAME), {**config, "version": "gemm"})
    assert torch.equal(read(folder), one.weight())


def test_old_awq_has_a_file_of_its_own(tmp_path: Path) -> None:
    one = Affine(5, 32, 64, 4, 32)
    write(tmp_path, awq_tensors(one, NAME), None)
    older = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(older))
    assert quantization_of(tmp_path) == ("awq", older)
    assert torch.equal(read(tmp_path), one.weight())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_integers_of_compressed_tensors_are_read(
    bits: int, symmetric: bool, tmp_path: Path
) -> None:
    one = Affine(6, 40, 96, bits, 32)
    zeros_RG = torch.full_like(one.zeros_RG, 2 ** (bits - 1)) if symmetric else None
    arguments = {"num_bits": bits, "symmetric": symmetric, "strategy": "group", "group_size": 32}
    folder = write(tmp_path, ct_tensors(one, NAME, symmetric=symmetric), ct_config(arguments))
    assert torch.equal(read(folder), one.weight(zeros_RG))


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_words_of_older_compressed_tensors_waste_bits(bits: int, tmp_path: Path) -> None:
    one = Affine(7, 33, 128, bits, 64)
    arguments = {"num_bits": bits, "symmetric": False, "strategy": "group", "group_size": 64}
    tensors = ct_tensors(one, NAME, symmetric=False, pack=padded_words)
    assert torch.equal(read(write(tmp_path, tensors, ct_config(arguments))), one.weight())


def test_whole_bytes_of_compressed_tensors_are_read(tmp_path: Path) -> None:
    one = Affine(8, 16, 64, 8, 64)
    codes_RC = (one.codes_RC - 128).to(torch.int8)
    tensors = {f"{NAME}.weight": codes_RC, f"{NAME}.weight_scale": one.scales_RG}
    folder = write(tmp_path, tensors, ct_config({"num_bits": 8}, "int-quantized"))
    assert torch.equal(read(folder), codes_RC.float() * one.scales_RG)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_mlx_is_read_embeddings_too(bits: int, tmp_path: Path) -> None:
    one, other = Affine(9, 16, 64, bits, 32), Affine(10, 24, 64, bits, 32)
    tensors = {**mlx_tensors(one, NAME), **mlx_tensors(other, "model.embed_tokens")}
    write(tmp_path, tensors, None, quantization={"group_size": 32, "bits": bits})
    # One rounding of code times scale, and one of adding the bias: half a unit each.
    assert torch.allclose(read(tmp_path), one.weight(), rtol=1e-6, atol=1e-6)
    embedded = QuantizedFolder(tmp_path).read("model.embed_tokens.weight")
    assert torch.allclose(embedded, other.weight(), rtol=1e-6, atol=1e-6)


def test_two_configurations_of_mlx_that_differ_are_refused(tmp_path: Path) -> None:
    config = {"group_size": 32, "bits": 4, "mode": "affine"}
    tensors = mlx_tensors(Affine(9, 16, 64, 4, 32), NAME)
    write(tmp_path, tensors, config, quantization=config)
    read(tmp_path)
    write(tmp_path, tensors, {**config, "bits": 2}, quantization=config)
    with pytest.raises(SourceError, match="of MLX differ"):
        read(tmp_path)


# ---------------------------------------------------------------------------------- floats


@pytest.mark.parametrize("shape", [(1,), (48, 1), (2, 3)])
def test_8_bit_floats_have_scales_of_tensors_rows_or_blocks(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    codes = (torch.randn(48, 80, generator=torch.Generator().manual_seed(0))).to(
        torch.float8_e4m3fn
    )
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    folder = write(tmp_path, {f"{NAME}.weight": codes, f"{NAME}.weight_scale_inv": scales}, config)
    grid = scales.reshape(shape if len(shape) == 2 else (1, 1))
    rows, columns = -(-48 // grid.shape[0]), 32 if grid.shape[1] > 1 else 80
    rows = 32 if shape == (2, 3) else rows
    expected = torch.empty(48, 80)
    for r in range(48):
        for c in range(80):
            expected[r, c] = codes[r, c].float() * grid[r // rows, c // columns]
    assert torch.equal(read(folder), expected)


FP4 = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}


def _fp4(packed: Tensor) -> Tensor:
    halves = [[code for byte in row for code in (byte % 16, byte // 16)] for row in packed.tolist()]
    return torch.tensor([[FP4[c % 8] * (-1 if c > 7 else 1) for c in row] for row in halves])


def test_nvfp4_has_scales_below_a_scale(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (4, 32), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(4, 4, generator=generator) * 100 + 1).to(torch.float8_e4m3fn)
    tensors = {
        f"{NAME}.weight_packed": packed,
        f"{NAME}.weight_scale": scales,
        f"{NAME}.weight_global_scale": torch.tensor([2688.0]),
        f"{NAME}.input_global_scale": torch.tensor([3.0]),
    }
    arguments = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    folder = write(tmp_path, tensors, ct_config(arguments, "nvfp4-pack-quantized"))
    expected = _fp4(packed) * (scales.float() / 2688.0).repeat_interleave(16, 1)
    assert torch.equal(read(folder), expected)
    assert QuantizedFolder(folder).names() == [f"{NAME}.weight"]


def test_mxfp4_has_exponents_for_scales(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (4, 32), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 130, (4, 2), generator=generator, dtype=torch.uint8)
    tensors = {f"{NAME}.weight_packed": packed, f"{NAME}.weight_scale": scales}
    arguments = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    folder = write(tmp_path, tensors, ct_config(arguments, "mxfp4-pack-quantized"))
    expected = _fp4(packed) * (2.0 ** (scales.float() - 127)).repeat_interleave(32, 1)
    assert torch.equal(read(folder), expected)


def test_experts_of_gpt_oss_have_their_columns_first(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 130, (2, 6, 3), generator=generator, dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    weight = QuantizedFolder(write(tmp_path, tensors, {"quant_method": "mxfp4"})).read(name)
    rows = [_fp4(blocks[e].reshape(6, 48)) for e in range(2)]
    dense = torch.stack(rows) * (2.0 ** (scales.float() - 127)).repeat_interleave(32, 2)
    assert torch.equal(weight, dense.transpose(1, 2))


# ------------------------------------------------------------------------------ bitsandbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bits_of_bitsandbytes_are_its_own(
    kind: str, nested: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    # Whole blocks in a row: others the library's CPU kernel scales by the wrong block.
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    stored = state.as_dict(packed=True)
    tensors = {f"{NAME}.weight": packed, **{f"{NAME}.weight.{k}": v for k, v in stored.items()}}
    folder = write(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    expected = functional.dequantize_4bit(packed, state)
    assert torch.equal(read(folder), expected)


def test_int8_of_bitsandbytes_is_its_own(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    scale = weight.abs().amax(1)
    codes = torch.round(weight / scale[:, None] * 127).to(torch.int8)
    tensors = {
        f"{NAME}.weight": codes,
        f"{NAME}.SCB": scale,
        f"{NAME}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    folder = write(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    # The library multiplies by a rounded 1/127 first or last, depending on its version.
    expected = functional.int8_vectorwise_dequant(codes, scale)
    assert torch.allclose(read(folder), expected, rtol=3e-7, atol=0)


# ----------------------------------------------------------------------------- compressed-tensors


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_integers_are_those_of_the_library(bits: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    from qaudit.formats.arithmetic import unpack

    codes = Affine(11, 8, 77, bits, 77).codes_RC
    signed = (codes - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(unpack(helpers.pack_to_int32(signed, bits), bits, 77).int(), codes)


# -------------------------------------------------------------------------------- bad input


def _gptq(folder: Path, **changes: Any) -> Path:
    one = Affine(12, 32, 64, 4, 32)
    return write(folder, gptq_tensors(one, NAME, first=True), {**GPTQ, **changes})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bits": 3}, "has 3 bits, and .* is stored in 4"),
        ({"group_size": 64}, "groups of 64 columns, and .* groups of 32"),
        ({"checkpoint_format": "marlin"}, "`marlin` of GPTQ is not known"),
        ({"bits": "four"}, "`bits` of the quantization configuration is `four`"),
        ({"quant_method": "quip"}, "the format `quip`"),
        ({"quant_method": "awq", "version": "gemv"}, "layout `gemv` is not read"),
        ({"quant_method": "bitsandbytes"}, "holds no linear of it"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "stored sparse"),
    ],
)
def test_a_configuration_that_its_tensors_contradict_is_refused(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=match) as info:
        QuantizedFolder(_gptq(tmp_path, **changes))
    assert info.value.hint
    assert info.value.code == 2


@pytest.mark.parametrize("first", [True, False], ids=["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_gptq_has_its_zero_points_in_the_middle(
    bits: int, first: bool, tmp_path: Path
) -> None:
    one = Affine(15, 32, 96, bits, 32)
    one.zeros_RG.fill_(2 ** (bits - 1))
    kind = "gptq" if first else "gptq_v2"
    config = {**GPTQ, "bits": bits, "checkpoint_format": kind, "sym": True}
    tensors = gptq_tensors(one, NAME, first=first)
    assert torch.equal(read(write(tmp_path, tensors, config)), one.weight())
    one.zeros_RG[5, 1] -= 1
    write(tmp_path, gptq_tensors(one, NAME, first=first), config)
    with pytest.raises(ConfigurationError, match=f"has `sym: true`, and `{NAME}.weight` zero poi"):
        read(tmp_path)
    rules = {"+:.*down_proj": {"sym": False}}
    write(tmp_path, gptq_tensors(one, NAME, first=first), {**config, "dynamic": rules})
    assert torch.equal(read(tmp_path), one.weight())


def test_awq_without_zero_points_has_them_in_the_middle(tmp_path: Path) -> None:
    one = Affine(16, 32, 96, 4, 32)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False}
    with pytest.raises(ConfigurationError, match=r"has `zero_point: false`, and `.*` zero points"):
        read(write(tmp_path, awq_tensors(one, NAME), config))
    one.zeros_RG.fill_(8)
    tensors = awq_tensors(one, NAME)
    assert torch.equal(read(write(tmp_path, tensors, config)), one.weight())
    del tensors[f"{NAME}.qzeros"]
    assert torch.equal(read(write(tmp_path, tensors, config)), one.weight())


def test_columns_that_are_said_to_be_in_order_are(tmp_path: Path) -> None:
    """Kernels leave out `g_idx` where `desc_act` is false."""
    one = Affine(17, 32, 96, 4, 32)
    one.group_of_C = one.group_of_C.roll(1)
    with pytest.raises(ConfigurationError, match="has `desc_act: false`, and the `g_idx` of"):
        read(write(tmp_path, gptq_tensors(one, NAME, first=True), GPTQ))


ASYMMETRIC = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32}


def _packed(folder: Path, **changes: Any) -> Path:
    one = Affine(6, 40, 96, 4, 32)
    config = ct_config({**ASYMMETRIC, **changes.pop("weights", {})})
    config["config_groups"]["group_0"] |= changes.pop("group", {})
    return write(folder, ct_tensors(one, NAME, symmetric=False), {**config, **changes})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"weights": {"symmetric": True}}, "has `symmetric: true`, and .* zero points"),
        ({"ignore": ["lm_head", NAME]}, f"`ignore` names `{NAME}`"),
        ({"ignore": ["re:.*down_proj"]}, f"`ignore` names `{NAME}`"),
        ({"group": {"targets": ["re:.*k_proj"]}}, "has `targets` for"),
        ({"group": {"targets": []}}, "has `targets` for"),
    ],
)
def test_groups_that_contradict_what_is_stored_are_refused(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        read(_packed(tmp_path, **changes))


def test_a_linear_may_be_named_by_its_group(tmp_path: Path) -> None:
    read(_packed(tmp_path / "a", group={"targets": [f"re:{NAME}"]}))
    read(_packed(tmp_path / "b", group={"targets": [NAME]}))


def test_bytes_that_are_said_to_have_4_bits_are_refused(tmp_path: Path) -> None:
    one = Affine(8, 16, 64, 8, 64)
    codes_RC = (one.codes_RC - 128).to(torch.int8)
    tensors = {f"{NAME}.weight": codes_RC, f"{NAME}.weight_scale": one.scales_RG}
    folder = write(tmp_path, tensors, ct_config({"num_bits": 4}, "int-quantized"))
    with pytest.raises(ConfigurationError, match=r"has 4 bits, and .* is stored in 8"):
        QuantizedFolder(folder)


E4M3, NAN = torch.float8_e4m3fn, float("nan")
EXPERTS = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("kind", "name", "change", "match"),
    [
        ("nvfp4", ".weight_scale", lambda t: t[:, :-1], r"groups of 16 needs \[4, 4\]"),
        ("nvfp4", ".weight_scale", lambda t: t.float(), "stored as `F32`"),
        ("nvfp4", ".weight_scale", lambda t: torch.full((4, 4), NAN).to(E4M3), "NaN or infinity"),
        ("nvfp4", ".weight_scale", lambda t: torch.zeros(4, 4).to(E4M3), "scales of zero over"),
        ("nvfp4", ".weight_scale", lambda t: None, "has no `weight_scale`"),
        ("nvfp4", ".weight_scale", lambda t: t.view(torch.uint8), "`nvfp4-pack.*`mxfp4-pack"),
        ("nvfp4", ".weight_global_scale", lambda t: None, "has no `weight_global_scale`"),
        ("nvfp4", ".weight_global_scale", lambda t: t * 0, "`weight_global_scale` of zero"),
        ("nvfp4", ".weight_global_scale", lambda t: t * NAN, "holds NaN or infinity"),
        ("nvfp4", ".weight_global_scale", lambda t: t.half(), "stored as `F16`"),
        ("nvfp4", ".weight_global_scale", lambda t: torch.ones(4), "more than one `weight_global"),
        ("nvfp4", ".weight_packed", lambda t: t[:, :-1], "62 columns, which groups of 16"),
        ("nvfp4", ".weight_packed", lambda t: t.view(torch.int32), "`nvfp4-.*`pack-quantized`"),
        ("nvfp4", ".input_global_scale", lambda t: None, "has no `input_global_scale`"),
        ("nvfp4", ".input_global_scale", lambda t: t * NAN, "which is no scale"),
        ("nvfp4", ".input_global_scale", torch.neg, "which is no scale"),
        ("mxfp4 of", ".weight_scale", lambda t: t.fill_(255), "scales that are not finite"),
        ("mxfp4 of", ".weight_scale", lambda t: t[:, :1], r"groups of 32 needs \[4, 2\]"),
        ("mxfp4 of", ".weight_scale", lambda t: t.to(torch.int8), "stored as `I8`"),
        ("mxfp4 of", ".weight_scale", lambda t: None, "has no `weight_scale`"),
        ("mxfp4", "_scales", lambda t: t.fill_(255), "scales that are not finite"),
        ("mxfp4", "_scales", lambda t: t[:, :-1], r"`blocks` needs \[2, 6, 3\]"),
        ("mxfp4", "_scales", lambda t: t.to(torch.int16), "stored as `I16`"),
        ("mxfp4", "_scales", lambda t: None, "has no `scales`"),
        ("mxfp4", "_blocks", lambda t: t[..., :8], "blocks of 8 bytes"),
        ("mxfp4", "_blocks", lambda t: t.flatten(2), "where 4 dimensions are needed"),
        ("mxfp4", "_blocks", lambda t: None, "holds no linear of it"),
    ],
)
def test_4_bit_floats_that_no_library_wrote_are_refused(
    kind: str, name: str, change: Any, match: str, tmp_path: Path
) -> None:
    tensors, config = _sample(kind)
    key = (EXPERTS if kind == "mxfp4" else NAME) + name
    new = change(tensors.pop(key))
    tensors |= {} if new is None else {key: new}
    with pytest.raises(QauditError, match=match) as info:
        weights = QuantizedFolder(write(tmp_path, tensors, config))
        for one in weights.names():
            weights.read(one)
    assert info.value.hint


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("nvfp4", {"group_size": 32}, "groups of 32 columns, and .* groups of 16"),
        ("nvfp4", {"type": "int"}, "has `int`, and .* is stored as `float`"),
        ("nvfp4", {"num_bits": 8}, "has 8 bits, and .* is stored in 4"),
        ("nvfp4", {"format": "mxfp4-pack-quantized"}, "`mxfp4-pack.*stored as `nvfp4-pack"),
        ("mxfp4 of", {"group_size": 16}, "groups of 16 columns, and .* groups of 32"),
        ("mxfp4 of", {"format": "nvfp4-pack-quantized"}, "`nvfp4-pack.*stored as `mxfp4-pack"),
        ("mxfp4", {"modules_to_not_convert": [EXPERTS]}, "`modules_to_not_convert` names"),
        ("mxfp4", {"modules_to_not_convert": ["model.layers.0"]}, "`modules_to_not_convert` names"),
        ("awq", {"modules_to_not_convert": ["down_proj"]}, "`modules_to_not_convert` names"),
        ("gptq", {"dynamic": {"-:.*down_proj": {}}}, "`dynamic` leaves"),
        ("bnb int8", {"llm_int8_skip_modules": ["down_proj"]}, "`llm_int8_skip_modules` names"),
        ("bnb int8", {"load_in_8bit": False}, "stored in 8 bits, and .* no `load_in_8bit` alone"),
        ("bnb nf4", {"load_in_8bit": True}, "stored in 4 bits, and .* no `load_in_4bit` alone"),
        ("fp8 of compressed-tensors", {"format": "dense"}, "has `dense`, and .* `float-quant"),
        ("fp8", {"ignored_layers": [NAME]}, "`ignored_layers` names"),
        ("mlx", {NAME: False}, "the configuration denies it"),
        ("compressed-tensors", {"ignore": ["re:(a+)+b"]}, "could take hours"),
        ("compressed-tensors", {"ignore": ["re:("]}, "is no pattern"),
    ],
)
def test_what_is_stored_quantized_is_not_denied_by_the_configuration(
    kind: str, changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    tensors, config = _sample(kind)
    groups = config.get("config_groups", {"": {"weights": {}}})
    for key, value in changes.items():
        (group,) = groups.values()
        inner = key in ("group_size", "type", "num_bits")
        (group["weights"] if inner else config)[key] = value
    with pytest.raises(ConfigurationError, match=match) as info:
        read(write(tmp_path, tensors, config))
    assert info.value.hint


@pytest.mark.parametrize("kind", ["nvfp4", "fp8 of compressed-tensors"])
def test_floats_have_no_zero_points(kind: str, tmp_path: Path) -> None:
    tensors, config = _sample(kind)
    zeros = torch.zeros(len(tensors[f"{NAME}.weight_scale"]), 1)
    tensors[f"{NAME}.weight_zero_point"] = zeros
    whole = read(write(tmp_path, tensors, config))
    tensors[f"{NAME}.weight_zero_point"] = zeros.clone().index_fill_(0, torch.tensor([1]), 1)
    with pytest.raises(SourceError, match="has zero points, and is stored as floats"):
        read(write(tmp_path, tensors, config))
    assert bool(torch.isfinite(whole).all())


@pytest.mark.parametrize(
    ("kind", "own", "match"),
    [
        ("gptq", {"desc_act": True}, "has no `g_idx`"),
        ("compressed-tensors", {"actorder": "group"}, "has no `weight_g_idx`"),
        ("fp8", {"weight_block_size": 96}, "`weight_block_size` is `96`, which is no pair"),
        ("bnb nf4", {}, r"has a `weight.quant_map` of shape \[16, 1\]"),
    ],
)
def test_what_decodes_as_something_else_is_refused(
    kind: str, own: dict[str, Any], match: str, tmp_path: Path
) -> None:
    tensors, config = _sample(kind)
    tensors.pop(f"{NAME}.g_idx", None)
    if kind == "bnb nf4":
        tensors[f"{NAME}.weight.quant_map"].unsqueeze_(1)
    groups = config.get("config_groups", {"": {"weights": config}})
    next(iter(groups.values()))["weights"] |= own
    with pytest.raises(SourceError, match=match):
        QuantizedFolder(write(tmp_path, tensors, config))


def test_a_table_that_bitsandbytes_does_not_decode_by_is_refused(tmp_path: Path) -> None:
    tensors, config = _sample("bnb nf4")
    tensors[f"{NAME}.weight.quant_map"] /= 2
    with pytest.raises(ConfigurationError, match="has a `quant_map` that is not the one of `nf4`"):
        read(write(tmp_path, tensors, config))


@pytest.mark.parametrize(
    ("suffix", "wrong", "match"),
    [
        (".scales", lambda t: t[:, :-1], r"`qweight` needs \[2, 32\]"),
        (".scales", lambda t: torch.full_like(t, float("inf")), "NaN or infinity"),
        (".scales", lambda t: torch.zeros_like(t), "scales of zero over"),
        (".g_idx", lambda t: t + 1, "a column in group 2, and 2 groups"),
        (".g_idx", lambda t: t[:-1], r"`g_idx` of shape \[63\]"),
        (".qzeros", lambda t: t[:, :-1], "packs 32 zero points in 3 words"),
        (".qweight", lambda t: t.float(), "stored as `F32`"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused_by_name(
    suffix: str, wrong: Any, match: str, tmp_path: Path
) -> None:
    path = _gptq(tmp_path) / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors[NAME + suffix] = wrong(tensors[NAME + suffix]).contiguous()
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(SourceError, match=match):
        read(tmp_path)


@pytest.mark.parametrize("suffix", [".scales", ".qzeros"])
def test_missing_tensors_are_named(suffix: str, tmp_path: Path) -> None:
    path = _gptq(tmp_path) / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors[NAME + suffix]
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(SourceError, match=f"has no `{suffix[1:]}`"):
        read(tmp_path)


def test_a_folder_that_is_not_quantized_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": torch.ones(2)}, None, model_type="llama")
    with pytest.raises(SourceError, match="no quantization configuration"):
        QuantizedFolder(folder)


def test_a_single_file_comes_before_an_index_and_shards_are_named(tmp_path: Path) -> None:
    folder = _gptq(tmp_path)
    other = gptq_tensors(Affine(18, 32, 64, 4, 32), NAME, first=True)
    stored = {name: tensor.contiguous() for name, tensor in other.items()}
    safetensors.torch.save_file(stored, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(stored, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(read(folder), Affine(12, 32, 64, 4, 32).weight())
    (note,) = QuantizedFolder(folder).notes
    assert "model-00001-of-00001.safetensors" in note


def test_biases_of_zeros_that_the_base_lacks_are_dropped(tmp_path: Path) -> None:
    one = Affine(13, 32, 64, 4, 32)
    tensors = {**gptq_tensors(one, NAME, first=True), f"{NAME}.bias": torch.zeros(32)}
    folder = write(tmp_path, tensors, GPTQ)
    assert QuantizedFolder(folder, base=[f"{NAME}.weight"]).names() == [f"{NAME}.weight"]
    assert len(QuantizedFolder(folder, base=[f"{NAME}.weight", f"{NAME}.bias"]).names()) == 2


def _of_torchao(kind: str) -> Affine:
    return Affine(14, 32, 64, 8 if kind.startswith("int8") else 4, 32)


def _sample(kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    family, _, own = kind.partition(" ")
    if family == "torchao":
        one = _of_torchao(own)
        return torchao.tensors(own, one, NAME), torchao.config(own, one.bits)
    return _other_sample(kind)


def _other_sample(kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    one = Affine(14, 32, 64, 4, 32)
    if kind == "gptq":
        return gptq_tensors(one, NAME, first=True), dict(GPTQ)
    if kind == "awq":
        return awq_tensors(one, NAME), {"quant_method": "awq", "bits": 4, "group_size": 32}
    if kind == "mlx":
        return mlx_tensors(one, NAME), {"mode": "affine", "bits": 4, "group_size": 32}
    if kind.startswith("fp8"):
        return _8_bit_floats(kind, one)
    if kind == "bnb int8":
        codes = (one.codes_RC - 8).to(torch.int8)
        tensors = {f"{NAME}.weight": codes, f"{NAME}.SCB": torch.ones(32)}
        return tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True}
    if kind == "bnb nf4":
        return _nf4(one), {"quant_method": "bitsandbytes", "load_in_4bit": True}
    if kind == "mxfp4":
        blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
        experts = "model.layers.0.mlp.experts.down_proj"
        scales = torch.randint(118, 130, (2, 6, 3), dtype=torch.uint8)
        stored = {f"{experts}_blocks": blocks, f"{experts}_scales": scales}
        return stored, {"quant_method": "mxfp4"}
    if kind == "mxfp4 of":
        scales = torch.full((4, 2), 120, dtype=torch.uint8)
        packed = torch.randint(1, 7, (4, 32), dtype=torch.uint8)
        arguments = {"num_bits": 4, "type": "float"}
        tensors = {f"{NAME}.weight_packed": packed, f"{NAME}.weight_scale": scales}
        return tensors, ct_config(arguments, "mxfp4-pack-quantized")
    if kind == "nvfp4":
        packed = torch.randint(0, 256, (4, 32), dtype=torch.uint8)
        tensors = {
            f"{NAME}.weight_packed": packed,
            f"{NAME}.weight_scale": torch.ones(4, 4).to(torch.float8_e4m3fn),
            f"{NAME}.weight_global_scale": torch.tensor([2688.0]),
            f"{NAME}.input_global_scale": torch.tensor([3.0]),
        }
        config = ct_config({"num_bits": 4, "type": "float"}, "nvfp4-pack-quantized")
        inputs = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"}
        config["config_groups"]["group_0"]["input_activations"] = inputs
        return tensors, config
    arguments = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32}
    return ct_tensors(one, NAME, symmetric=False), ct_config(arguments)


def _8_bit_floats(kind: str, one: Affine) -> tuple[dict[str, Tensor], dict[str, Any]]:
    weight = {f"{NAME}.weight": one.codes_RC.to(torch.float8_e4m3fn)}
    if kind == "fp8":
        return {**weight, f"{NAME}.weight_scale_inv": torch.ones(1, 1)}, {"quant_method": "fp8"}
    scales = {f"{NAME}.weight_scale": torch.ones(32, 1)}
    if kind == "fp8 of compressed-tensors":
        config = ct_config({"num_bits": 8, "type": "float"}, "float-quantized")
        return {**weight, **scales}, config
    fixed = {"quant_method": "fp8", "activation_scheme": "static"}
    return {**weight, **scales, f"{NAME}.input_scale": torch.ones(1)}, fixed


def _nf4(one: Affine) -> dict[str, Tensor]:
    """Return what bitsandbytes stores of 32 x 64 codes with nested scales."""
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "shape": [32, 64],
        "dtype": "float32",
        "nested_blocksize": 256,
        "nested_offset": 0.1,
        "nested_dtype": "float32",
    }
    text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return {
        f"{NAME}.weight": (one.codes_RC[:, ::2] * 16 + one.codes_RC[:, 1::2]).to(torch.uint8),
        f"{NAME}.weight.absmax": torch.arange(32, dtype=torch.uint8),
        f"{NAME}.weight.quant_map": torch.tensor(_TABLES["nf4"]),
        f"{NAME}.weight.nested_absmax": torch.ones(1),
        f"{NAME}.weight.nested_quant_map": torch.linspace(-1, 1, 256),
        f"{NAME}.weight.quant_state.bitsandbytes__nf4": text,
    }  # fmt: skip


_KINDS = (
    "gptq", "awq", "compressed-tensors", "mlx", "fp8", "fp8 fixed", "fp8 of compressed-tensors",
    "bnb int8", "bnb nf4", "mxfp4", "mxfp4 of", "nvfp4",
    *(f"torchao {kind}" for kind in torchao.KINDS if torchao.INSTALLED),
)  # fmt: skip


def _metadata(kind: str) -> dict[str, str]:
    """Return what the header of a sample's file holds beside tensors."""
    family, _, own = kind.partition(" ")
    if family != "torchao":
        return {}
    return {f"{NAME}.weight": torchao.described(own, _of_torchao(own))}


@pytest.mark.parametrize("kind", _KINDS)
def test_samples_are_read_while_they_are_whole(kind: str, tmp_path: Path) -> None:
    weights = QuantizedFolder(write(tmp_path, *_sample(kind), _metadata(kind)))
    assert all(bool(torch.isfinite(weights.read(name)).all()) for name in weights.names())


@pytest.mark.parametrize("kind", _KINDS)
def test_a_linear_without_one_of_its_parts_is_refused_or_the_same(
    kind: str, tmp_path: Path
) -> None:
    tensors, config = _sample(kind)
    name, other = min(tensors).rpartition("proj")[0] + "proj", "model.layers.1.other"
    whole = {**tensors, **{key.replace(name, other): t.clone() for key, t in tensors.items()}}
    texts = _metadata(kind)
    texts |= {key.replace(name, other): text for key, text in texts.items()}
    weights = QuantizedFolder(write(tmp_path / "whole", whole, config, texts))
    dense = next(one for one in weights.linears if one.startswith(other))
    for key in (key for key in whole if key.startswith(other)):
        part = {k: t for k, t in whole.items() if k != key}
        folder = write(tmp_path / key, part, config, texts)
        try:
            found = QuantizedFolder(folder).read(dense)
        except SourceError as error:
            assert other in error.message
        else:
            assert torch.equal(found, weights.read(dense)), key


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


def _damage(data: st.DataObject, tensors: dict[str, Tensor]) -> None:
    """Change, drop or rename one stored tensor."""
    name = data.draw(st.sampled_from(sorted(tensors)))
    damage = data.draw(st.sampled_from(["none", "cut", "drop", "cast", "flat", "bytes", "rename"]))
    if damage == "cut":
        tensors[name] = tensors[name][: data.draw(st.integers(0, len(tensors[name])))]
    elif damage == "drop":
        del tensors[name]
    elif damage == "cast":
        kinds = [torch.int32, torch.uint8, torch.float32, torch.int8, torch.int64, torch.float16]
        dtype = data.draw(st.sampled_from(kinds))
        tensors[name] = tensors[name].contiguous().view(torch.uint8).to(dtype)
    elif damage == "bytes":
        raw = tensors[name].contiguous().clone()
        seed = data.draw(st.integers(0, 2**32))
        noise = torch.randint(0, 256, raw.view(torch.uint8).shape, dtype=torch.uint8,
                              generator=torch.Generator().manual_seed(seed))  # fmt: skip
        tensors[name] = noise.view(raw.dtype)
    elif damage == "flat":
        tensors[name] = tensors[name].flatten()
    elif damage == "rename":
        suffixes = [
            ".weight",
            ".weight_scale",
            ".weight.absmax",
            ".SCB",
            "_blocks",
            ".weight_g_idx",
        ]
        tensors[NAME + data.draw(st.sampled_from(suffixes))] = tensors.pop(name)


def _damage_texts(data: st.DataObject, metadata: dict[str, str]) -> None:
    """Change a value at any depth of a description, rename it, or cut its text."""
    name, text = metadata.popitem()
    place = table = json.loads(text)
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(_JSON)
    text = json.dumps(table)[: data.draw(st.sampled_from([10**6, 10**6, 40]))]
    metadata[data.draw(st.sampled_from([name, name, "a", "a.weight", f"{name}.b"]))] = text


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_repositories_raise_nothing_but_our_own_errors(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kind = data.draw(st.sampled_from(_KINDS))
    (tensors, config), metadata = _sample(kind), _metadata(kind)
    if metadata and data.draw(st.booleans()):
        _damage_texts(data, metadata)
    for _ in range(data.draw(st.integers(0, 2))):
        key = data.draw(st.sampled_from(sorted(config)))
        config[key] = data.draw(_JSON)
    _damage(data, tensors)
    folder = tmp_path_factory.mktemp("damaged")
    write(folder, tensors or {"a": torch.ones(1)}, config, metadata)
    cut = data.draw(st.integers(0, 40))
    if cut == 0:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, 400))])
    try:
        weights = QuantizedFolder(folder)
        for one in weights.names():
            assert tuple(weights.read(one).shape) == tuple(weights.shape(one))
    except QauditError as error:
        assert error.message and error.hint
