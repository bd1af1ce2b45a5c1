"""Safetensors files of torchao become the weights that their parts and descriptions mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from qaudit.errors import ConfigurationError, QauditError, SourceError
from qaudit.formats.reading import Rounding
from qaudit.formats.weights import QuantizedFolder, format_of
from tests.support.quantized import Affine, write
from tests.support.torchao import INSTALLED, KINDS, config, description, named, tensors

pytestmark = pytest.mark.skipif(
    not INSTALLED, reason="qaudit-torchao is not installed: make test installs it"
)

NAME = "model.layers.0.mlp.down_proj"
WEIGHT = f"{NAME}.weight"


def sample(kind: str) -> Affine:
    bits = 4 if kind in ("int4", "intx", "int8 asymmetric", "float8", "fp8 by token") else 8
    return Affine(20, 32, 96, bits, 32)


def write_as(folder: Path, kind: str, **changes: Any) -> Path:
    """Write one linear; `changes` are of its description's `_data`."""
    one = sample(kind)
    own = description(kind, one)
    own["_data"] |= changes
    texts = {"format": "pt", WEIGHT: json.dumps(own), "tensor_names": json.dumps([WEIGHT])}
    return write(folder, tensors(kind, one, NAME), config(kind, one.bits), texts)


def expected(kind: str) -> Tensor:
    """Return the weight by definition: (code - zero point) * scale, floats without zero points."""
    one = sample(kind)
    if kind in ("float8", "fp8 by token"):
        return one.weight(torch.full_like(one.zeros_RG, 2 ** (one.bits - 1)))
    return one.weight()


@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_is_read(kind: str, tmp_path: Path) -> None:
    folder = QuantizedFolder(write_as(tmp_path, kind))
    assert folder.names() == [WEIGHT]
    # int4 adds a zero point in float after the product: one more rounding of each.
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if kind == "int4" else {"rtol": 0, "atol": 0}
    assert torch.allclose(folder.read(WEIGHT), expected(kind), **tolerance)
    bits = 8 if kind in ("float8", "fp8 by token") else sample(kind).bits
    act = 8 if kind.endswith("by token") else 16
    assert format_of(tmp_path) == ("torchao", bits, act)
    assert folder.bits == bits
    known = {"fp8 by token": Rounding("fp8"), "int8 by token": Rounding("int8")}
    assert folder.linears[WEIGHT].rounding == known.get(kind)
    assert bool(folder.notes) == (kind == "int8 asymmetric")


@pytest.mark.parametrize("block", [[32, 96], [16, 48]])
def test_scales_may_be_of_tensors_and_blocks(block: list[int], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    codes_RC = torch.randint(-128, 128, (32, 96), generator=generator, dtype=torch.int8)
    shape = (32 // block[0], 96 // block[1])
    scales, zeros = torch.rand(shape, generator=generator) + 0.5, torch.ones(shape).to(torch.int8)
    parts = {"qdata": codes_RC, "scale": scales, "zero_point": zeros}
    own = {**named("Int8Tensor", {"block_size": block}), "_tensor_data_names": list(parts)}
    stored = {f"{NAME}._weight_{part}": tensor for part, tensor in parts.items()}
    write(tmp_path, stored, config("int8", 8), {WEIGHT: json.dumps(own)})
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    assert torch.equal(QuantizedFolder(tmp_path).read(WEIGHT), (codes_RC.float() - 1) * wide)


def test_linears_may_have_configurations_by_name(tmp_path: Path) -> None:
    write_as(tmp_path, "int8 asymmetric")
    leaf = config("int8", 8)["quant_type"]["default"]
    tables = {"fqn_to_config": {"lm_head": None, "_default": leaf}}
    own = {"quant_method": "torchao", "quant_type": {"default": named("FqnToConfig", tables)}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": own}))
    (note,) = QuantizedFolder(tmp_path).notes
    assert "int8_asym_per_token" in note
    assert format_of(tmp_path) == ("torchao", 8, 16)


# -------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("int8", {"block_size": [1, 48]}, r"`weight_scale` of shape \[32, 3\] where .* \[32, 2\]"),
        ("int8", {"block_size": [1, 50]}, "blocks of 1 by 50, which do not divide"),
        ("int8", {"block_size": [0, True]}, "which is no pair of sizes"),
        ("intx", {"target_dtype": named("torch.dtype", "int2")}, "has 4 bits, and .* stored in 2"),
        ("intx", {"target_dtype": "uint4"}, "codes of `uint4`"),
        ("intx", {"activation_quantization": "x"}, "rounds activations as `none`, and .* as `x`"),
        ("int4", {"shape": [32, 48]}, r"a shape of `\[32, 48\]`"),
        ("int4", {"block_size": [2, 32]}, "blocks of 2 rows"),
    ],
)
def test_descriptions_that_contradict_the_tensors_are_refused(
    kind: str, changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(QauditError, match=match) as info:
        QuantizedFolder(write_as(tmp_path, kind, **changes))
    assert info.value.hint


def test_codes_out_of_range_are_refused(tmp_path: Path) -> None:
    folder = write_as(tmp_path, "intx")
    path = folder / "model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        texts = file.metadata()
    stored = safetensors.torch.load_file(path)
    stored[f"{NAME}._weight_qdata"][0, 0] = 8
    safetensors.torch.save_file(stored, path, texts)
    with pytest.raises(SourceError, match="a code of 8, and 4 bits"):
        QuantizedFolder(folder).read(WEIGHT)


def test_zero_points_that_the_mapping_denies_are_refused(tmp_path: Path) -> None:
    write_as(tmp_path, "intx")
    path = tmp_path / "config.json"
    own = json.loads(path.read_text())
    leaf = own["quantization_config"]["quant_type"]["default"]["_data"]
    leaf["mapping_type"] = named("MappingType", "SYMMETRIC")
    path.write_text(json.dumps(own))
    with pytest.raises(ConfigurationError, match=r"`SYMMETRIC`, and .* zero points"):
        QuantizedFolder(tmp_path).read(WEIGHT)
    stored = tensors("intx", sample("intx"), NAME)
    stored[f"{NAME}._weight_zero_point"].zero_()
    text = json.dumps(description("intx", sample("intx")))
    folder = write(tmp_path, stored, own["quantization_config"], {WEIGHT: text})
    assert bool(QuantizedFolder(folder).read(WEIGHT).any())


def _part(folder: Path, part: str, change: Any) -> Path:
    """Write 4-bit codes of `int4` with one of their tensors changed, or left out."""
    stored = tensors("int4", sample("int4"), NAME)
    name = f"{NAME}._weight_{part}"
    new = change(stored.pop(name))
    stored |= {} if new is None else {name: new}
    text = json.dumps(description("int4", sample("int4")))
    return write(folder, stored, config("int4", 4), {WEIGHT: text})


@pytest.mark.parametrize(
    ("part", "change", "match"),
    [
        ("scale", lambda t: t[:-1], r"a `weight_scale` of shape \[2, 32\] where .* \[3, 32\]"),
        ("scale", lambda t: t.T, "a `weight_scale` of shape"),
        ("scale", lambda t: t.to(torch.float64), "stored as `F64`"),
        ("scale", lambda t: t.clone().fill_(float("nan")), "holds NaN or infinity"),
        ("scale", torch.zeros_like, "scales of zero over"),
        ("zero_point", lambda t: t.clone().fill_(float("inf")), "holds NaN or infinity"),
        ("zero_point", lambda t: t.to(torch.int8), "stored as `I8`"),
        ("zero_point", lambda t: None, "is stored as qdata, scale, and its description names"),
        ("qdata", lambda t: t.to(torch.int32), "stored as `I32`"),
        ("qdata", lambda t: t[:, :-1], "a shape of"),
    ],
)
def test_parts_that_no_library_wrote_are_refused(
    part: str, change: Any, match: str, tmp_path: Path
) -> None:
    with pytest.raises(QauditError, match=match) as info:
        QuantizedFolder(_part(tmp_path, part, change)).read(WEIGHT)
    assert info.value.hint


def _rewrite(folder: Path, name: str, text: str | None, **more: Tensor) -> Path:
    kept = {} if text is None else {name: text}
    stored = {**tensors("int8", sample("int8"), NAME), **more}
    return write(folder, stored, config("int8", 8), kept)


OTHER = json.dumps(named("Int4TilePackedTo4dTensor", {}))


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        (WEIGHT, None, "no description in the header"),
        (WEIGHT, "[" * 3000, "no description in the header"),
        (WEIGHT, '{"_type": 3, "_data": [1]}', "no description in the header"),
        (WEIGHT, OTHER, "`Int4TilePackedTo4dTensor` of torchao, which is not read"),
        (WEIGHT, json.dumps(named("Int8Tensor", {})), "its description names nothing"),
        ("a.experts", json.dumps(named("Int8Tensor", {})), "is no `.weight` of a linear"),
        ("b.weight", json.dumps(named("Int8Tensor", {})), "has no `qdata`"),
    ],
)
def test_what_a_header_does_not_describe_is_refused(
    name: str, text: str | None, match: str, tmp_path: Path
) -> None:
    with pytest.raises(QauditError, match=match) as info:
        QuantizedFolder(_rewrite(tmp_path, name, text))
    assert info.value.hint


def test_the_layout_of_older_versions_is_named(tmp_path: Path) -> None:
    text = json.dumps(named("Float8Tensor", {}))
    folder = _rewrite(tmp_path, "b.weight", text, **{"b.weight:qdata": torch.ones(2, 2)})
    with pytest.raises(ConfigurationError, match=r"torchao 0\.14.*`Int8WeightOnlyConfig` of ver"):
        QuantizedFolder(folder)


def test_scales_of_inputs_are_refused(tmp_path: Path) -> None:
    one = sample("int8")
    own = description("int8", one)
    own["_tensor_data_names"].append("act_pre_scale")
    scale = {f"{NAME}._weight_act_pre_scale": torch.ones(96)}
    with pytest.raises(ConfigurationError, match="multiplies what it reads by a scale"):
        QuantizedFolder(_rewrite(tmp_path, WEIGHT, json.dumps(own), **scale))


@pytest.mark.parametrize(
    ("quant_type", "match"),
    [
        ("int4_weight_only", "`int4_weight_only` of torchao is not read"),
        ({"default": named("UIntXWeightOnlyConfig", {})}, "`UIntXWeightOnlyConfig` of torchao"),
        ({"default": {**named("Int8WeightOnlyConfig", {}), "_version": 1}}, "is of version 1"),
        (None, "`None` of torchao is not read"),
        (
            {"default": {**named("IntxWeightOnlyConfig", {"weight_dtype": 4}), "_version": 2}},
            "`weight_dtype` of the quantization configuration is `4`",
        ),
    ],
)
def test_other_configurations_and_versions_are_refused(
    quant_type: Any, match: str, tmp_path: Path
) -> None:
    write_as(tmp_path, "int8")
    own = {"quant_method": "torchao", "quant_type": quant_type}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": own}))
    for read in (QuantizedFolder, format_of):
        with pytest.raises(ConfigurationError, match=match) as info:
            read(tmp_path)
        assert info.value.hint


def test_pickled_files_are_refused(tmp_path: Path) -> None:
    write_as(tmp_path, "int8")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match="are pickled, and quantized weights"):
        QuantizedFolder(tmp_path)
