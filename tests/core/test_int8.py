"""W8A8 and SmoothQuant against their formulas in double precision."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from qaudit.core.registry import parse_scheme
from qaudit.errors import SourceError
from tests.support.schemes import COLUMNS, example


def test_tokens_are_rounded_to_127_and_a_half_steps():
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    quantized = parse_scheme("int8").quantize(example())
    scale = x.abs().amax(1, keepdim=True) / 127.5
    expected = (x / scale).round().clamp(-128, 127) * scale
    # One float32 rounding of a scale, and of a product.
    assert torch.allclose(quantized.inputs(x), expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_smoothquant_moves_columns_as_published(alpha):
    linears = example(fold=True)
    quantized = parse_scheme(f"smoothquant:alpha={alpha}").quantize(linears)
    weights = torch.cat(list(linears.weights.values())).double()
    largest = weights.abs().amax(0).clamp(min=1e-5)
    scale = linears.inputs.absmax_C.double() ** alpha / largest ** (1 - alpha)
    assert torch.allclose(quantized.column_scale_C.double(), scale, rtol=1e-5)
    x = torch.randn(40, COLUMNS, generator=torch.Generator().manual_seed(1))
    x *= linears.inputs.absmax_C / 3
    scale = quantized.column_scale_C

    def rounded(values):  # in float32: the largest of a row is at a tie, between 127 and 128
        step = values.abs().amax(1, keepdim=True) / 127.5
        step = torch.where(step == 0, 1.0, step)
        return (values / step).round().clamp(-128, 127) * step

    for name, weight in linears.weights.items():
        expected = rounded(x / scale).double() @ rounded(weight * scale).double().T
        output = quantized.inputs(x) @ quantized.weights[name].T
        # Roundings of 160 products and of the scales that are multiplied and divided by.
        assert (output - expected).norm() / expected.norm() < 1e-5


def test_smoothquant_helps_inputs_with_large_columns():
    linears = example(fold=True)
    x = torch.randn(200, COLUMNS, generator=torch.Generator().manual_seed(1))
    x *= linears.inputs.absmax_C / 3
    errors = {}
    for spec in ("int8", "smoothquant"):
        quantized = parse_scheme(spec).quantize(linears)
        errors[spec] = sum(
            float((quantized.inputs(x) @ quantized.weights[name].T - x @ weight.T).square().sum())
            for name, weight in linears.weights.items()
        )
    assert errors["smoothquant"] < errors["int8"] / 2


def test_linears_behind_no_norm_are_rounded_without_scales():
    linears = dataclasses.replace(example(fold=True), fold_is_norm=False)
    smooth, plain = (parse_scheme(s).quantize(linears) for s in ("smoothquant", "int8"))
    assert smooth.column_scale_C is None
    for name, weight in plain.weights.items():
        assert torch.equal(smooth.weights[name], weight)


def test_post_norm_models_are_refused_by_name():
    linears = dataclasses.replace(example(), block_has_norm_folds=False, block=3)
    with pytest.raises(SourceError, match=r"no norm of block 3 .*`attn\.q_proj`") as refused:
        parse_scheme("smoothquant").quantize(linears)
    assert "`int8`" in refused.value.hint
