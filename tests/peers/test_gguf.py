"""GGUF blocks against the `gguf` package, byte for byte."""

import gguf
import pytest
import torch

from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme
from qaudit.core.schemes.float4 import MxFloat4Weights


def weight():
    values = 0.02 * torch.randn(48, 512, generator=torch.Generator().manual_seed(0))
    values[3], values[5, :64] = 0, 0
    return values


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_bytes_are_theirs_and_they_unpack_them_to_the_same_weights(name):
    quantized = parse_scheme(f"gguf-{name.lower()}").quantize(Linears({"w": weight()}))
    kind = gguf.GGMLQuantizationType[name]
    packed = quantized.stored["w"].packed_RB.numpy()
    assert (gguf.quants.quantize(weight().numpy(), kind) == packed).all()
    assert (gguf.quants.dequantize(packed, kind) == quantized.weights["w"].numpy()).all()


def test_mxfp4_of_llama_cpp_floors_its_scales():
    kind = gguf.GGMLQuantizationType.MXFP4
    theirs = gguf.quants.dequantize(gguf.quants.quantize(weight().numpy(), kind), kind)
    floor, even = (
        MxFloat4Weights(rule=rule).quantize(Linears({"w": weight()})).weights["w"].numpy()
        for rule in ("floor", "even")
    )
    assert (theirs == floor).all()
    assert 0.02 < (theirs != even).mean() < 0.1
