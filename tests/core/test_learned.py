"""Learned transformations: exact in themselves, repeatable, and better than where they start."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.learned import Goal, Transform, cayley_step, learn, round_through
from qaudit.core.registry import parse_scheme
from qaudit.core.schemes.quarot import round_tokens
from qaudit.errors import SchemeError
from tests.support.schemes import COLUMNS, example

LEARNED = ("flatquant", "spinquant", "ostquant")


def rows(linears):
    return torch.cat(list(linears.weights.values()))


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


@pytest.mark.parametrize("name", LEARNED)
def test_the_transformation_alone_leaves_the_product(name):
    scheme, linears = parse_scheme(f"{name}-4bit:steps=20"), example()
    x, weight = linears.inputs.sample_TC, rows(linears)
    turn = learn(x, weight, scheme._start(linears), scheme._goal())
    assert not torch.equal(turn.right_BB, scheme._start(linears).right_BB)
    product, exact = turn.of_inputs(x) @ turn.of_weights(weight).T, x @ weight.T
    assert float((product - exact).norm() / exact.norm()) < 1e-5
    gram = turn.of_inputs(x).double()
    assert torch.allclose(turn.of_gram(x.T @ x).double(), gram.T @ gram, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", ["spinquant", "ostquant"])
def test_rotations_stay_rotations(name):
    scheme, linears = parse_scheme(f"{name}-4bit:steps=40"), example()
    turn = learn(linears.inputs.sample_TC, rows(linears), scheme._start(linears), scheme._goal())
    for one in (turn.left_AA, turn.right_BB):
        assert torch.allclose(one @ one.T, torch.eye(len(one)), atol=1e-5)
    learned = not torch.equal(turn.scale_C, torch.ones(COLUMNS))
    assert learned == (name == "ostquant")  # where none is learned, none is stored


@given(st.integers(2, 20), st.floats(0.01, 1.0), st.integers(0, 99))
def test_a_cayley_step_is_orthogonal_and_goes_down(size, angle, seed):
    generator = torch.Generator().manual_seed(seed)
    start = torch.linalg.qr(torch.randn(size, size, generator=generator).double()).Q
    target = torch.randn(size, size, generator=generator).double()
    moved = cayley_step(start, -target, angle)  # the gradient of -(turn * target).sum()
    assert torch.allclose(moved @ moved.T, torch.eye(size).double(), atol=1e-10)
    small = cayley_step(start, -target, 1e-4)
    assert float((small * target).sum()) >= float((start * target).sum())


def test_rounding_that_passes_gradients_is_the_rounding_of_tokens():
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rounded = round_through(x, 4, torch.tensor(0.9))
    assert torch.allclose(rounded, round_tokens(x.detach(), 4, 0.9), atol=1e-6)
    rounded.sum().backward()
    assert float(x.grad.abs().sum()) > 0


@pytest.mark.parametrize("name", LEARNED)
def test_learning_helps_on_text_that_was_not_seen(name):
    linears = example()
    x = held_out(linears)
    start, end = (output_error(linears, f"{name}-4bit:steps={n}", x) for n in (0, 60))
    assert end < start


def test_a_learned_transformation_is_better_than_a_fixed_rotation():
    linears = example()
    x = held_out(linears)
    fixed = output_error(linears, "quarot-rtn-4bit", x)
    assert output_error(linears, "flatquant-4bit", x) < 0.8 * fixed


def test_the_best_step_is_returned():
    linears = example()
    start = Transform.start(torch.ones(COLUMNS))
    goal = Goal(6, 4, 4, orthogonal=False, scaling=True, clipping=True, rate=1e3)
    turn = learn(linears.inputs.sample_TC, rows(linears), start, goal)
    assert torch.equal(turn.right_BB, start.right_BB)  # steps of that size only do harm


@pytest.mark.parametrize("columns", [1, 7, 97, 96])
def test_every_width_has_a_kronecker_product(columns):
    start = Transform.start(torch.ones(columns))
    assert len(start.left_AA) * len(start.right_BB) == columns
    x = torch.randn(4, columns)
    assert torch.allclose(start.of_inputs(x).norm(dim=1), x.norm(dim=1), atol=1e-4)


@pytest.mark.parametrize("steps", [-1, 100_001])
def test_steps_out_of_range_are_refused(steps):
    with pytest.raises(SchemeError, match="steps are out of range"):
        parse_scheme(f"spinquant-4bit:steps={steps}")
