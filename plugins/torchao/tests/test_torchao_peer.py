"""Our reading of torchao's files against torchao itself: `make peers`."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import qaudit_torchao as ours
from qaudit.errors import QauditError
from qaudit.formats.reading import Rounding
from qaudit.formats.weights import QuantizedFolder
from tests.support.damage import ODD
from tests.support.filled import filled
from tests.support.models import save_model
from tests.support.quantized import write

pytestmark = pytest.mark.peers

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:]
)


def configurations():
    import torchao.quantization as ao

    by_group, by_row, symmetric = ao.PerGroup(32), ao.PerRow(), ao.MappingType.SYMMETRIC
    asymmetric = ao.MappingType.ASYMMETRIC
    table = {
        "int8": ao.Int8WeightOnlyConfig(version=2),
        "int8 by tensor": ao.Int8WeightOnlyConfig(version=2, granularity=ao.PerTensor()),
        "int8 by token": ao.Int8DynamicActivationInt8WeightConfig(version=2, granularity=by_row),
        "fp8": ao.Float8WeightOnlyConfig(),
        "8da4w": ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=by_group
        ),
    }
    for bits in range(2, 9):
        for mapping in (symmetric, asymmetric):
            table[f"{bits}-bit, {mapping.name.lower()}"] = ao.IntxWeightOnlyConfig(
                weight_dtype=getattr(torch, f"int{bits}"),
                granularity=by_group,
                mapping_type=mapping,
            )
    return table


def saved(folder: Path, config, dtype: torch.dtype):
    """Quantize and save a model by transformers; return it with the folder's reader."""
    from transformers import AutoModelForCausalLM, TorchAoConfig

    source = save_model(folder / "model", 1, "llama")
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, quantization_config=TorchAoConfig(config)
    )
    model.save_pretrained(folder / "quantized")
    return model, QuantizedFolder(folder / "quantized")


@DTYPES
def test_weights_that_transformers_saved_are_those_of_torchao(tmp_path: Path, dtype):
    for i, (name, config) in enumerate(configurations().items()):
        model, read = saved(tmp_path / str(i), config, dtype)
        assert len(read.linears) >= 7, name
        for linear in filled(read.linears):
            theirs = model.get_parameter(linear).dequantize()
            # A code times a scale is exact in float32 unless the scale is of float32 itself;
            # rounded to the model's dtype both are the same number.
            assert torch.equal(read.read(linear).to(dtype), theirs), f"{name}, {linear}"


def flattened(tensor, folder: Path, config: str) -> QuantizedFolder:
    """Save one weight by torchao's own function, and open it."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    parts, texts = flatten_tensor_state_dict({"a.weight": tensor})
    own = {"_type": config, "_version": 2, "_data": {"granularity": {"_type": "PerRow"}}}
    dtype = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
    own["_data"] |= {"activation_dtype": dtype}
    write(folder, {}, {"quant_method": "torchao", "quant_type": {"default": own}})
    save_file(parts, folder / "model.safetensors", texts)
    return QuantizedFolder(folder)


def test_packed_codes_of_4_bits_are_those_of_torchao(tmp_path: Path):
    from torchao.prototype.gptq.api import _int4_row_dequantize_zp
    from torchao.quantization import Int4Tensor

    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (16, 64), generator=generator, dtype=torch.int8)
    scale, zero = (torch.rand(2, 16, generator=generator) + 0.5 for _ in range(2))
    # The packing needs a GPU's library; this is its definition, the first column in the low half.
    packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    tensor = Int4Tensor(packed, scale, zero, [1, 32], torch.Size([16, 64]))
    read = flattened(tensor, tmp_path, "Int4WeightOnlyConfig").read("a.weight")
    # Theirs is (code + 8) * scale + (zero - 8 * scale), which rounds four times, up to 24 here.
    theirs = _int4_row_dequantize_zp(codes, scale, zero, 32)
    assert torch.allclose(read, theirs, rtol=0, atol=4 * 2**-20)


@pytest.mark.parametrize("bound", [None, 2.0])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_activations_are_rounded_as_torchao_does(tmp_path: Path, kind, bound):
    from torchao.quantization import Float8Tensor, Int8Tensor, PerRow
    from torchao.quantization.quantize_.common.quantize_tensor_kwargs import (
        _choose_quant_func_and_quantize_tensor as quantized,
    )
    from torchao.quantization.quantize_.workflows import (
        QuantizeTensorToFloat8Kwargs,
        QuantizeTensorToInt8Kwargs,
    )

    if kind == "int8" and bound is not None:
        pytest.skip("int8 has no bound")
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(32, 64, generator=generator) for _ in range(2))
    if kind == "fp8":
        own = QuantizeTensorToFloat8Kwargs(granularity=PerRow(), hp_value_ub=bound)
        tensor = Float8Tensor.from_hp(weight, act_quant_kwargs=own)
        config = "Float8DynamicActivationFloat8WeightConfig"
    else:
        own = QuantizeTensorToInt8Kwargs(granularity=PerRow())
        tensor = Int8Tensor.from_hp(weight, PerRow(), act_quant_kwargs=own)
        config = "Int8DynamicActivationInt8WeightConfig"
    described = json.loads(_text(tensor))
    rounding = ours.rounding_of_tensor(described["_data"], described["_tensor_data_names"])
    assert rounding == Rounding(kind, bound)
    theirs = quantized(x, own)
    # torchao multiplies by the rounded reciprocal of an int8 scale: up to 127 times two units in
    # the last place, so that codes at a half may differ. fp8 is divided, and equal to the bit.
    steps = x / theirs.scale
    near_half = (steps - steps.floor() - 0.5).abs() < 127 * 2**-22
    same = rounding(x) == theirs.dequantize()
    assert bool((same | near_half).all() if kind == "int8" else same.all())
    if bound is None and kind == "fp8":
        opened = flattened(tensor, tmp_path, config)
        assert opened.linears["a.weight"].rounding == rounding
        assert torch.equal(opened.read("a.weight"), tensor.dequantize())


def _text(tensor) -> str:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    return flatten_tensor_state_dict({"a.weight": tensor})[1]["a.weight"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("torchao")


@cache
def whole(folder: Path, name: str) -> Path:
    saved(folder / name, configurations()[name], torch.float32)
    return folder / name / "quantized"


VALUES = [[1, 16], [1, 64], [64, 64], "int4", "int8", "SYMMETRIC", "ASYMMETRIC"]
VALUES += ["int8_asym_per_token"]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_edited_files_are_refused_or_read_as_transformers_reads_them(data, root, tmp_path_factory):
    from transformers import AutoModelForCausalLM

    names = ["int8", "int8 by token", "fp8", "4-bit, symmetric", "4-bit, asymmetric"]
    source = whole(root, data.draw(st.sampled_from(names)))
    folder = tmp_path_factory.mktemp("edited") / "model"
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        texts = file.metadata()
    tensors, config = load_file(path), json.loads((folder / "config.json").read_text())
    linears = sorted(key for key in texts if key.endswith("_proj.weight"))
    name = data.draw(st.sampled_from(linears))
    if data.draw(st.booleans()):
        texts[name] = json.dumps(edited(json.loads(texts[name]), data))
    else:
        config["quantization_config"] = edited(config["quantization_config"], data)
    if data.draw(st.booleans()):
        part = data.draw(st.sampled_from(sorted(k for k in tensors if k.startswith(name[:-7]))))
        change = data.draw(st.sampled_from([torch.neg, torch.zeros_like, torch.t]))
        tensors[part] = change(tensors[part].float()).to(tensors[part].dtype).contiguous()
    save_file(tensors, path, texts)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        read = QuantizedFolder(folder)
        ours_of = {linear: read.read(linear) for linear in read.linears}
    except QauditError:
        return
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        theirs_of = {one: model.get_parameter(one).dequantize() for one in ours_of}
    except Exception:  # noqa: BLE001 - a library raises what it likes
        return
    assert all(torch.equal(ours_of[one], theirs_of[one]) for one in ours_of)


def edited(table, data):
    """Return JSON with one value in it replaced: by one of another file, or by anything."""
    holders = [table]
    for one in holders:
        holders += [
            v for v in (one.values() if isinstance(one, dict) else ()) if isinstance(v, dict)
        ]
    holder = data.draw(st.sampled_from([one for one in holders if one]))
    key = data.draw(st.sampled_from(sorted(holder)))
    holder[key] = data.draw(st.sampled_from([*VALUES, *ODD]))
    return table
