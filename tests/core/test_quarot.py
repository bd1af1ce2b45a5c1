"""Rotations by their definition, and what they leave of a product."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard

from qaudit.core.registry import parse_scheme
from qaudit.core.rotation import rotate, rotated, rotation
from qaudit.errors import SchemeError
from tests.support.filled import filled
from tests.support.schemes import COLUMNS, example


@given(st.integers(1, 300))
def test_rotations_are_orthogonal_symmetric_and_flat(n):
    matrix = rotation(n)
    assert torch.allclose(matrix @ matrix.T, torch.eye(n).double(), atol=1e-13)
    assert torch.allclose(matrix, matrix.T, atol=1e-13)
    assert float(matrix.abs().max()) <= (2 / n) ** 0.5 + 1e-12


def test_powers_of_two_are_scipys_hadamard():
    assert np.allclose(rotation(64).numpy() * 8, hadamard(64))


@given(st.integers(1, 300), st.integers(0, 99))
def test_two_small_products_are_the_rotation(n, seed):
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(seed)).double()
    assert torch.allclose(rotate(x), x @ rotation(n), atol=1e-11)


def test_second_moments_are_those_of_rotated_inputs():
    x = torch.randn(400, COLUMNS, generator=torch.Generator().manual_seed(0))
    linears = example()
    inputs = dataclasses.replace(linears.inputs, gram_CC=x.T @ x)
    gram = rotated(dataclasses.replace(linears, inputs=inputs)).inputs.gram_CC
    expected = rotate(x.double()).T @ rotate(x.double())
    assert torch.allclose(gram.double(), expected, atol=1e-2)  # of 400 in float32
    assert torch.equal(gram, gram.T)


@pytest.mark.parametrize("name", ["quarot", "quarot-rtn"])
def test_eight_bits_and_unrounded_inputs_leave_the_product(name):
    linears = example()
    quantized = parse_scheme(f"{name}-8bit:act=16").quantize(linears)
    x = torch.randn(40, COLUMNS, generator=torch.Generator().manual_seed(1))
    for key, weight in filled(linears.weights.items()):
        exact, output = x @ weight.T, quantized.inputs(x) @ quantized.weights[key].T
        assert float((output - exact).norm() / exact.norm()) < 0.02  # 1/255 of a row's range


def test_activations_are_cut_and_rounded_as_published():
    x = torch.randn(6, COLUMNS, generator=torch.Generator().manual_seed(1))
    quantized = parse_scheme("quarot-rtn-4bit:rotate=false").quantize(example())
    scale = 0.9 * x.abs().amax(1, keepdim=True) / 7
    assert torch.allclose(quantized.inputs(x), (x / scale).round().clamp(-8, 7) * scale)


def test_rotation_helps_where_columns_stand_out():
    linears = example()
    x = torch.randn(200, COLUMNS, generator=torch.Generator().manual_seed(1))
    x *= linears.inputs.absmax_C / 3
    errors = {}
    for spec in ("quarot-rtn-4bit:rotate=false", "quarot-rtn-4bit", "quarot-4bit"):
        quantized = parse_scheme(spec).quantize(linears)
        errors[spec] = sum(
            float((quantized.inputs(x) @ quantized.weights[name].T - x @ weight.T).square().sum())
            for name, weight in linears.weights.items()
        )
    without, nearest, gptq = errors.values()
    assert nearest < without / 2
    assert gptq < nearest


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("quarot-4bit:clip=0", "clip of 0.0"),
        ("quarot-4bit:clip=1.1", "clip of 1.1"),
        ("quarot-4bit:act=1", "1 bits"),
        ("quarot-4bit:act=12", "12 bits"),
    ],
)
def test_parameters_out_of_range_are_refused(spec, words):
    with pytest.raises(SchemeError, match=words):
        parse_scheme(spec)
