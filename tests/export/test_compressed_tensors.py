"""compressed-tensors reads the weights of our files bit for bit, under its own presets."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from qaudit.core.linears import Inputs, Linears
from qaudit.core.registry import parse_scheme
from qaudit.errors import SchemeError
from qaudit.formats.registry import format_named

PRESETS = {
    "fp8": "FP8_DYNAMIC",
    "fp8:blocks=true": "FP8_BLOCK",
    "int8": "W8A8",
    "nvfp4": "NVFP4",
    "nvfp4a16": "NVFP4A16",
    "mxfp4": "MXFP4",
    "mxfp4a16": "MXFP4A16",
    "rtn-4bit": "W4A16",
    "rtn-4bit:sym=false": "W4A16_ASYM",
    "rtn-3bit:group=-1": "W3A16",
}


def weight() -> torch.Tensor:
    values = torch.randn(256, 384, generator=torch.Generator().manual_seed(5)) / 50
    values[3], values[5, :64] = 0, 0
    return values


@pytest.mark.parametrize("spec", PRESETS)
def test_it_decompresses_to_the_weights_that_were_measured(spec: str) -> None:
    scheme, columns = parse_scheme(spec), 384
    inputs = Inputs(torch.eye(columns), torch.ones(columns), columns, 2 * torch.ones(columns))
    quantized = scheme.quantize(Linears({"w": weight()}, inputs))
    form = format_named("compressed-tensors", scheme)
    config = QuantizationConfig.model_validate(
        form.config(("lm_head",), symmetric="sym=false" not in spec)
    )
    theirs = config.config_groups["group_0"]
    packed = form.pack("a", quantized.stored["w"])
    state = {name.removeprefix("a."): tensor for name, tensor in packed.items()}
    if theirs.format == "pack-quantized":
        state["weight_scale"] = state["weight_scale"].float()  # keeps the product in float32
    compressor = BaseCompressor.get_value_from_registry(theirs.format)
    assert set(state) >= set(compressor.compression_param_names(theirs)) - {"weight_g_idx"}
    dense_RC = compressor.decompress(state, theirs)["weight"].float()
    if theirs.format == "nvfp4-pack-quantized":  # rounds every step to bfloat16, at most thrice
        assert torch.allclose(dense_RC, quantized.weights["w"], rtol=3 * 2.0**-8, atol=0)
        dense_RC = in_float32(state, theirs)
    assert torch.equal(dense_RC, quantized.weights["w"])


def in_float32(state: dict[str, torch.Tensor], theirs: QuantizationScheme) -> torch.Tensor:
    """Return the weight by the same two functions of theirs, without rounding between them."""
    rows, half = state["weight_packed"].shape
    values = unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * half, dtype=torch.float32)
    scale, whole = state["weight_scale"].float(), state["weight_global_scale"]
    return dequantize(values, scale, args=theirs.weights, global_scale=whole, dtype=torch.float32)


@pytest.mark.parametrize("spec", [spec for spec in PRESETS if "group=-1" not in spec])
def test_the_configuration_is_that_of_its_preset(spec: str) -> None:
    form = format_named("compressed-tensors", parse_scheme(spec))
    written = QuantizationConfig.model_validate(form.config((), symmetric="sym=false" not in spec))
    ours = written.config_groups["group_0"]
    theirs = preset_name_to_scheme(PRESETS[spec], ["Linear"])
    observers = {"observer": None, "observer_kwargs": {}}  # of calibration, which is over
    for part in ("weights", "input_activations"):
        mine, preset = getattr(ours, part), getattr(theirs, part)
        if preset is None:
            assert mine is None
            continue
        assert mine.model_copy(update=observers) == preset.model_copy(update=observers)


@pytest.mark.parametrize("spec", ["quarot-rtn-4bit", "mxfp4:rotate=true"])
def test_rotations_are_refused(spec: str) -> None:
    scheme = parse_scheme(spec)
    stored = scheme.quantize(Linears({"w": weight()})).stored["w"]
    with pytest.raises(SchemeError, match="read"):
        format_named("compressed-tensors", scheme).pack("a", stored)
