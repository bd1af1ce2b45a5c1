"""Rotations by their definition, and what they leave of a product."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard

from qaudit.core.linears import Inputs, alone
from qaudit.core.registry import parse_scheme
from qaudit.core.rotation import (
    LearningCourse,
    Transform,
    cayley_step,
    descend,
    learn,
    rotate,
    rotated,
    rotation,
)
from tests.support.filled import filled
from tests.support.reference import plain_gptq
from tests.support.reference.plain_gptq import stored_scale
from tests.support.schemes import COLUMNS, LEARNED, TRANSFORMS, example


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


# --------------------------------------------------------------------------------------------------
# Learned transformations: exact in themselves, repeatable, and better than where they start.


def learned(name, linears, steps=20):
    """Return a scheme and what it learns of a group."""
    scheme = parse_scheme(f"{name}-4bit:steps={steps}")
    (turn,) = learn(alone(linears, name), scheme._start, scheme._goal, steps)
    return scheme, turn


def held_out(linears):
    """Other tokens with the same second moments."""
    x = torch.randn(600, COLUMNS, generator=torch.Generator().manual_seed(3)).double()
    gram = linears.inputs.gram_CC.double() / linears.inputs.tokens
    return (x @ torch.linalg.cholesky(gram).T).float()


def output_error(linears, spec, x):
    quantized = parse_scheme(spec).quantize(linears)
    return sum(
        float((quantized.inputs(x) @ quantized.weights[n].T - x @ w.T).square().sum())
        for n, w in linears.weights.items()
    )


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_transformation_alone_leaves_the_product(name):
    linears = example()
    scheme, turn = learned(name, linears)
    x = linears.inputs.sample_TC
    assert not torch.equal(turn.right_BB, scheme._start(linears).right_BB)
    for weight in linears.weights.values():
        product, exact = turn.of_inputs(x) @ turn.of_weights(weight).T, x @ weight.T
        assert float((product - exact).norm() / exact.norm()) < 1e-5
    gram = turn.of_inputs(x).double()
    assert torch.allclose(turn.of_gram(x.T @ x).double(), gram.T @ gram, rtol=1e-3, atol=1e-2)
    if name != "flatquant":
        for one in (turn.left_AA, turn.right_BB):
            assert torch.allclose(one @ one.T, torch.eye(len(one)), atol=1e-5)
    scaled = not torch.equal(turn.scale_C, torch.ones(COLUMNS))
    assert scaled == (name != "spinquant")  # where none is learned, none is stored


def in_double(turn, linears):
    """Return the matrix of a transformation, and each turned weight, by plain linear algebra."""
    factors = (one.double().numpy() for one in (turn.left_AA, turn.right_BB))
    matrix = np.kron(*factors) / turn.scale_C.double().numpy()[:, None]
    inverse = np.linalg.inv(matrix)
    turned = {n: w.double().numpy() @ inverse.T for n, w in linears.weights.items()}
    return matrix, turned


def test_flatquant_is_plain_rounding_behind_its_matrix():
    linears = example()
    scheme, turn = learned("flatquant", linears)
    quantized = scheme._apply(linears, turn)
    matrix, turned = in_double(turn, linears)
    for name, weight in turned.items():
        share = turn.row_clips[name].double().numpy()
        largest = np.abs(weight).max(1, keepdims=True)
        scale = stored_scale(share * np.where(largest == 0, 1, largest) / 7, "bf16")
        expected = np.clip(np.round(weight / scale), -8, 7) * scale
        off = np.abs(quantized.weights[name].numpy() - expected) / scale
        # Weights are turned in float32, 1e-6 of a step off: about one in 1e5 is that near to a tie.
        assert (off > 1e-4).sum() <= 2
    x = linears.inputs.sample_TC.double().numpy() @ matrix
    scale = float(turn.token_clip) * np.abs(x).max(1, keepdims=True) / 7
    expected = np.clip(np.round(x / scale), -8, 7) * scale
    off = np.abs(quantized.inputs(linears.inputs.sample_TC).numpy() - expected) / scale
    assert (off > 1e-3).mean() < 1e-4


@pytest.mark.parametrize("name", ["spinquant", "ostquant"])
def test_rotated_weights_are_plain_gptq_behind_their_matrix(name, monkeypatch):
    linears = example(torch.float64)
    scheme, turn = learned(name, example())
    wide = Transform(
        *(one.double() for one in (turn.left_AA, turn.right_BB, turn.scale_C, turn.token_clip)), {}
    )
    gram_CC = linears.inputs.gram_CC.double()
    inputs = Inputs(gram_CC, linears.inputs.absmean_C.double(), linears.inputs.tokens)
    given_weights = {n: wide.of_weights(w) for n, w in linears.weights.items()}
    stored, _ = scheme._round(replace(linears, inputs=inputs), given_weights, wide)
    matrix, turned = in_double(wide, linears)
    for key, weight in turned.items():
        scale = stored[key].scales_RG.double().numpy()[:, 0]
        monkeypatch.setattr(plain_gptq, "find_scale", lambda *_, scale=scale: (scale, 8))
        turned_CC = matrix.T @ gram_CC.numpy() @ matrix
        _, expected = plain_gptq.gptq(weight, turned_CC, bits=4, group=-1, damp=0.01)
        np.testing.assert_allclose(stored[key].decode().numpy(), expected, atol=1e-12)


@given(st.integers(2, 20), st.floats(0.01, 1.0), st.integers(0, 99))
def test_a_cayley_step_is_orthogonal_and_goes_down(size, angle, seed):
    generator = torch.Generator().manual_seed(seed)
    start = torch.linalg.qr(torch.randn(size, size, generator=generator).double()).Q
    target = torch.randn(size, size, generator=generator).double()
    moved = cayley_step(start, -target, angle)  # the gradient of -(turn * target).sum()
    assert torch.allclose(moved @ moved.T, torch.eye(size).double(), atol=1e-10)
    small = cayley_step(start, -target, 1e-4)
    assert float((small * target).sum()) >= float((start * target).sum())


def test_what_is_learned_with_is_what_is_made():
    linears = example()
    scheme, turn = learned("flatquant", linears)
    course = LearningCourse(linears, turn, replace(scheme._goal, clipping=False))
    expected, made = course.quantized(), scheme._apply(linears, turn)
    x = linears.inputs.sample_TC
    torch.testing.assert_close(expected.inputs(x), made.inputs(x), rtol=0, atol=1e-5)
    for name, weight in filled(made.weights.items()):
        # The inverse of the same matrix with a gradient and without: equal but for its rounding.
        assert torch.isclose(expected.weights[name], weight, atol=1e-6).float().mean() > 0.999


@pytest.mark.parametrize("name", LEARNED)
def test_learning_helps_on_text_that_was_not_seen(name):
    linears = example()
    x = held_out(linears)
    spec = name if name.startswith("base-q") else f"{name}-4bit"
    start, end = (output_error(linears, f"{spec}:steps={n}", x) for n in (0, 60))
    assert end < start
    if name == "flatquant":
        assert end < 0.8 * output_error(linears, "quarot-rtn-4bit", x)


def test_the_start_is_kept_where_steps_only_do_harm():
    linears = example()
    scheme = parse_scheme("flatquant-4bit")
    goal = replace(scheme._goal, rate=1e3)
    start = scheme._start(linears)
    course = LearningCourse(linears, start, goal)
    assert not descend(alone(linears, "flatquant"), [course], 6)
    assert torch.equal(course.transform().right_BB, start.right_BB)
    assert torch.equal(course.transform().scale_C, start.scale_C)


@pytest.mark.parametrize("columns", [1, 7, 97, 96])
def test_every_width_has_a_kronecker_product(columns):
    start = Transform.start(torch.ones(columns), {}, 4)
    assert len(start.left_AA) * len(start.right_BB) == columns
    x = torch.randn(4, columns)
    assert torch.allclose(start.of_inputs(x).norm(dim=1), x.norm(dim=1), atol=1e-4)
