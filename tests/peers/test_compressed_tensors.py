"""FP8, NVFP4, MXFP4 and W8A8 against compressed-tensors, bit for bit in float32.

compressed-tensors is what llm-compressor writes and vLLM reads. Its presets are compared under
their own names, weights and activations, zero rows and groups included.
"""

from functools import cache

import pytest
import torch

from qaudit.core.floats import tensor_scale
from qaudit.core.linears import Inputs, Linears
from qaudit.core.registry import parse_scheme

pytest.importorskip("compressed_tensors", reason="the lock has compressed-tensors")


def weight(dtype=torch.float32):
    values = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    values[3], values[5, :64] = 0, 0
    return values.to(dtype)


def activations(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(40, 512, generator=generator)
    values *= torch.exp(torch.randn(512, generator=generator))
    values[7], values[9, :64] = 0, 0
    return values.to(dtype)


@cache
def _arguments(preset, part):
    from compressed_tensors.quantization import quant_scheme

    return getattr(quant_scheme.preset_name_to_scheme(preset, ["Linear"]), part)


def theirs(preset, values, part, largest):
    """Round values as compressed-tensors does; `largest` is that of the whole tensor."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = _arguments(preset, part)
    scale = None
    if arguments.strategy == "tensor_group":
        scale = generate_gparam(-largest, largest)
    if arguments.strategy in ("channel", "token"):
        low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    elif arguments.strategy == "block":
        square = values.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        low, high = square.amin((1, 3)), square.amax((1, 3))
    else:
        groups = values.unflatten(-1, (-1, arguments.group_size))
        low, high = groups.amin(-1), groups.amax(-1)
    scales, zeros = calculate_qparams(low, high, arguments, global_scale=scale)
    return fake_quantize(values, scales, zeros, arguments, global_scale=scale)


PRESETS = [
    ("fp8", "FP8_DYNAMIC"),
    ("fp8:blocks=true", "FP8_BLOCK"),
    ("mxfp4", "MXFP4"),
    ("nvfp4", "NVFP4"),
    ("int8", "W8A8"),
]
every_preset = pytest.mark.parametrize(("spec", "preset"), PRESETS, ids=lambda one: one)


def quantized(spec, dtype=torch.float32):
    x = activations()
    inputs = Inputs(x.T @ x, x.abs().mean(0), len(x), x.abs().amax(0))
    return parse_scheme(spec).quantize(Linears({"w": weight(dtype)}, inputs))


@pytest.mark.parametrize(
    ("spec", "preset"), [*PRESETS, ("mxfp4a16", "MXFP4A16"), ("nvfp4a16", "NVFP4A16")]
)
def test_weights_are_theirs(spec, preset):
    values = weight()
    assert torch.equal(
        quantized(spec).weights["w"], theirs(preset, values, "weights", values.abs().max())
    )


@pytest.mark.parametrize("spec", ["fp8", "fp8:blocks=true", "int8"])
def test_scales_in_bf16_are_rounded_before_the_codes(spec):
    joined = quantized(f"{spec}:scale_dtype=bf16")
    stored = joined.stored["w"]
    scales = stored.scales if spec.startswith("fp8") else stored.scales_RG
    assert scales.dtype == torch.bfloat16
    assert torch.equal(joined.weights["w"], stored.decode())
    # Half a step of the widest codes, 32 of 448 or 1 of 127, and a scale off by up to 2^-8, which
    # clips the largest weights by as much.
    step = 16 / 448 if spec.startswith("fp8") else 0.5 / 127
    error = (joined.weights["w"] - weight()).abs()
    assert float(error.max()) <= (step + 2.0**-8) * float(weight().abs().max())


@every_preset
def test_activations_are_theirs(spec, preset):
    x = activations()
    change = quantized(spec).inputs
    assert change is not None
    assert torch.equal(change(x), theirs(preset, x, "input_activations", x.abs().max()))


def test_the_scale_of_a_tensor_is_theirs():
    from compressed_tensors.quantization.utils import generate_gparam

    values = weight()
    largest = values.abs().max()
    assert torch.equal(
        tensor_scale(largest), generate_gparam(values.min(), values.max()).reshape(())
    )


def test_they_compute_the_scales_of_bf16_weights_in_bf16():
    # Not a fault of either side: a file with scales in float32 holds ours.
    values = weight(torch.bfloat16)
    ours = quantized("fp8", torch.bfloat16).weights["w"]
    other = theirs("FP8_DYNAMIC", values, "weights", values.abs().max())
    differing = float((ours != other).float().mean())
    assert 0.05 < differing < 0.6
    # The widest step of e4m3 is 32 of 448; then one rounding to bf16 of each side.
    assert float((ours - other).abs().max() / values.abs().max()) < 32 / 448 + 2.0**-7
