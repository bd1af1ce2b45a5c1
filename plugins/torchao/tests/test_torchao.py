"""Safetensors files of torchao become the weights that their parts and descriptions mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qaudit.errors import ConfigurationError, QauditError
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


Edit = Callable[[dict[str, Tensor], dict[str, str]], None]


def write_as(
    folder: Path, kind: str, edit: Edit = lambda stored, texts: None, own: Any = None, **data: Any
) -> Path:
    """Write one linear; `data` are changes of its description, `own` another configuration."""
    one = sample(kind)
    described = description(kind, one)
    described["_data"] |= data
    texts = {"format": "pt", WEIGHT: json.dumps(described), "tensor_names": json.dumps([WEIGHT])}
    stored = tensors(kind, one, NAME)
    edit(stored, texts)
    return write(folder, stored, own or config(kind, one.bits), texts)


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


def of_type(quant_type: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": quant_type}


def test_linears_may_have_configurations_by_name(tmp_path: Path) -> None:
    leaf = config("int8", 8)["quant_type"]["default"]
    tables = {"fqn_to_config": {"lm_head": None, "_default": leaf}}
    own = of_type({"default": named("FqnToConfig", tables)})
    (note,) = QuantizedFolder(write_as(tmp_path, "int8 asymmetric", own=own)).notes
    assert "int8_asym_per_token" in note
    assert format_of(tmp_path) == ("torchao", 8, 16)


# -------------------------------------------------------------------------------- bad input


def part(name: str, change: Callable[[Tensor], Tensor | None]) -> dict[str, Any]:
    """Change one of the tensors, or leave it out."""

    def edit(stored: dict[str, Tensor], texts: dict[str, str]) -> None:
        new = change(stored.pop(f"{NAME}._weight_{name}"))
        if new is not None:
            stored[f"{NAME}._weight_{name}"] = new

    return {"edit": edit}


def header(name: str, text: str | None, **more: Tensor) -> dict[str, Any]:
    """Leave one text in the header, or none."""

    def edit(stored: dict[str, Tensor], texts: dict[str, str]) -> None:
        texts.clear()
        texts |= {} if text is None else {name: text}
        stored |= more

    return {"edit": edit}


SCALED = description("int8", sample("int8"))
SCALED["_tensor_data_names"].append("act_pre_scale")
INPUTS = {f"{NAME}._weight_act_pre_scale": torch.ones(96)}
EMPTY = json.dumps(named("Int8Tensor", {}))
OLD = header("b.weight", json.dumps(named("Float8Tensor", {})), **{"b.weight:qdata": torch.ones(2)})
DENIED = config("intx", 4)
DENIED["quant_type"]["default"]["_data"]["mapping_type"] = named("MappingType", "SYMMETRIC")


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [  # descriptions that contradict the tensors
        ("int8", {"block_size": [1, 48]}, r"`weight_scale` of shape \[32, 3\] where .* \[32, 2\]"),
        ("int8", {"block_size": [1, 50]}, "blocks of 1 by 50, which do not divide"),
        ("int8", {"block_size": [0, True]}, "which is no pair of sizes"),
        ("intx", {"target_dtype": named("torch.dtype", "int2")}, "has 4 bits, and .* stored in 2"),
        ("intx", {"target_dtype": "uint4"}, "codes of `uint4`"),
        ("intx", {"activation_quantization": "x"}, "rounds activations as `none`, and .* as `x`"),
        ("int4", {"shape": [32, 48]}, r"a shape of `\[32, 48\]`"),
        ("int4", {"block_size": [2, 32]}, "blocks of 2 rows"),
        ("intx", {"own": DENIED}, r"`SYMMETRIC`, and .* zero points"),
        # parts that no library wrote
        ("intx", part("qdata", lambda t: torch.full_like(t, 8)), "a code of 8, and 4 bits"),
        ("int4", part("scale", lambda t: t[:-1]),
         r"a `weight_scale` of shape \[2, 32\] where .* \[3, 32\]"),
        ("int4", part("scale", lambda t: t.T), "a `weight_scale` of shape"),
        ("int4", part("scale", lambda t: t.to(torch.float64)), "stored as `F64`"),
        ("int4", part("scale", lambda t: t.fill_(float("nan"))), "holds NaN or infinity"),
        ("int4", part("scale", torch.zeros_like), "scales of zero over"),
        ("int4", part("zero_point", lambda t: t.fill_(float("inf"))), "holds NaN or infinity"),
        ("int4", part("zero_point", lambda t: t.to(torch.int8)), "stored as `I8`"),
        ("int4", part("zero_point", lambda t: None),
         "is stored as qdata, scale, and its description names"),
        ("int4", part("qdata", lambda t: t.to(torch.int32)), "stored as `I32`"),
        ("int4", part("qdata", lambda t: t[:, :-1]), "a shape of"),
        # what a header does not describe
        ("int8", header(WEIGHT, None), "no description in the header"),
        ("int8", header(WEIGHT, "[" * 3000), "no description in the header"),
        ("int8", header(WEIGHT, '{"_type": 3, "_data": [1]}'), "no description in the header"),
        ("int8", header(WEIGHT, json.dumps(named("Int4TilePackedTo4dTensor", {}))),
         "`Int4TilePackedTo4dTensor` of torchao, which is not read"),
        ("int8", header(WEIGHT, EMPTY), "its description names nothing"),
        ("int8", header("a.experts", EMPTY), "is no `.weight` of a linear"),
        ("int8", header("b.weight", EMPTY), "has no `qdata`"),
        ("int8", OLD, r"torchao 0\.14.*`Int8WeightOnlyConfig` of ver"),
        ("int8", header(WEIGHT, json.dumps(SCALED), **INPUTS),
         "multiplies what it reads by a scale"),
    ],
)  # fmt: skip
def test_files_that_torchao_did_not_write_are_refused(
    kind: str, changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(QauditError, match=match) as info:
        QuantizedFolder(write_as(tmp_path, kind, **changes)).read(WEIGHT)
    assert info.value.hint


def test_zero_points_of_zero_are_those_of_a_symmetric_mapping(tmp_path: Path) -> None:
    folder = write_as(tmp_path, "intx", own=DENIED, **part("zero_point", torch.zeros_like))
    assert bool(QuantizedFolder(folder).read(WEIGHT).any())


@pytest.mark.parametrize(
    ("quant_type", "match"),
    [
        ("int4_weight_only", "`int4_weight_only` of torchao is not read"),
        ({"default": named("UIntXWeightOnlyConfig", {})}, "`UIntXWeightOnlyConfig` of torchao"),
        ({"default": {**named("Int8WeightOnlyConfig", {}), "_version": 1}}, "is of version 1"),
        (None, "`None` of torchao is not read"),
        ({"default": {**named("IntxWeightOnlyConfig", {"weight_dtype": 4}), "_version": 2}},
         "`weight_dtype` of the quantization configuration is `4`"),
    ],
)  # fmt: skip
def test_other_configurations_and_versions_are_refused(
    quant_type: Any, match: str, tmp_path: Path
) -> None:
    write_as(tmp_path, "int8", own=of_type(quant_type))
    for read in (QuantizedFolder, format_of):
        with pytest.raises(ConfigurationError, match=match) as info:
            read(tmp_path)
        assert info.value.hint


def test_pickled_files_are_refused(tmp_path: Path) -> None:
    write_as(tmp_path, "int8")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match="are pickled, and quantized weights"):
        QuantizedFolder(tmp_path)
