"""DuQuant's parts against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.linears import alone
from qaudit.core.registry import parse_scheme
from qaudit.core.rotation import descend, total_error
from qaudit.core.scheme import Calibration
from qaudit.core.schemes.duquant import Clips, DualTurn, even_rotation, greedy_rotation, zigzag
from tests.support.filled import filled
from tests.support.reference.plain_gptq import stored_scale
from tests.support.schemes import COLUMNS, example


@given(st.integers(1, 60))
def test_the_even_rotation_is_the_published_product_of_givens_matrices(size):
    turn = np.eye(size)
    for i in range(size - 1):
        givens = np.eye(size)
        givens[i, i] = givens[i + 1, i + 1] = 1 / np.sqrt(i + 2)
        givens[i, i + 1], givens[i + 1, i] = -np.sqrt((i + 1) / (i + 2)), np.sqrt((i + 1) / (i + 2))
        turn = givens @ turn
    order = np.arange(size)
    order[[0, size - 1]] = order[[size - 1, 0]]
    expected = turn[order][:, order]
    np.testing.assert_allclose(even_rotation(size).numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(np.abs(expected[0]), 1 / np.sqrt(size), atol=1e-12)


def test_a_greedy_step_spreads_the_largest_column_evenly():
    x = torch.zeros(1, 8, dtype=torch.float64)
    x[0, 3] = 4.0
    assert float((x @ greedy_rotation(x)).abs().max()) <= 4 / 8**0.5 + 1e-12


@given(st.integers(1, 70), st.integers(1, 40), st.integers(0, 9))
def test_zigzag_deals_every_column_once_and_blocks_are_alike(columns, block, seed):
    size = torch.rand(columns, generator=torch.Generator().manual_seed(seed))
    order = zigzag(size, block)
    assert sorted(order.tolist()) == list(range(columns))
    if columns % block == 0:
        means = size[order].reshape(-1, block).mean(1)
        # As the paper's bound: blocks differ by no more than one gap of the sorted sizes each deal.
        assert float(means.max() - means.min()) <= float(size.max() - size.min()) / block * 2 + 1e-6


@given(st.integers(2, 90), st.sampled_from([-1, 7, 16, 128]), st.integers(0, 9))
def test_the_whole_transformation_is_orthogonal(columns, block, seed):
    sample = torch.randn(12, columns, generator=torch.Generator().manual_seed(seed)).double()
    turn = DualTurn.of(sample, block)
    identity = torch.eye(columns).double()
    assert torch.allclose(turn(identity) @ turn(identity).T, identity, atol=1e-9)


def test_eight_bits_and_unrounded_inputs_leave_the_product():
    linears = example()
    quantized = parse_scheme("duquant-8bit:act=16:weight_clip=1.0").quantize(linears)
    x = linears.inputs.sample_TC
    for name, weight in filled(linears.weights.items()):
        exact, output = x @ weight.T, quantized.inputs(x) @ quantized.weights[name].T
        assert float((output - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("spec", ["duquant-4bit", "duquant-4bit:block=32"])
def test_it_helps_where_columns_stand_out(spec):
    linears = example()
    x = torch.randn(200, COLUMNS, generator=torch.Generator().manual_seed(1))
    x *= linears.inputs.absmax_C / 3
    errors = []
    for text in ("quarot-rtn-4bit:rotate=false", spec):
        quantized = parse_scheme(text).quantize(linears)
        errors.append(
            sum(
                float((quantized.inputs(x) @ quantized.weights[n].T - x @ w.T).square().sum())
                for n, w in linears.weights.items()
            )
        )
    assert errors[1] < errors[0] / 2


def test_zigzag_goes_forth_and_back():
    assert zigzag(torch.tensor([9.0, 8, 7, 6, 5, 4]), 2).tolist() == [0, 5, 1, 4, 2, 3]


def test_learned_shares_are_plain_rounding_and_come_nearer():
    scheme, linears = parse_scheme("duquant-4bit:lwc=true"), example()
    block, clips = alone(linears, "duquant"), Clips(scheme, linears)
    before = total_error(block, [clips])
    assert descend(block, [clips], 30)
    assert total_error(block, [clips]) < 0.9 * before
    scale_C, sample_TC = clips._scale_C.double(), linears.inputs.sample_TC
    turn = DualTurn.of(sample_TC / clips._scale_C, scheme.block)
    matrix = turn(torch.eye(COLUMNS)).double()
    for name, weight in linears.weights.items():
        turned = (weight.double() * scale_C @ matrix).numpy()
        below, above = torch.sigmoid(clips._ends[name]).double().detach().numpy()
        low = np.minimum(below * turned.min(1, keepdims=True), 0)
        high = np.maximum(above * turned.max(1, keepdims=True), 0)
        high[low == high] += 1
        scale = stored_scale((high - low) / 15, "bf16")
        zero = np.round(-low / scale)
        expected = (np.clip(np.round(turned / scale) + zero, 0, 15) - zero) * scale
        alive = turned.any(1)  # a row of zeros is zero on any grid
        off = np.abs(clips.stored(name).decode().numpy() - expected) / scale
        # Turned in float32: about one weight in 1e5 is so near to a tie that it falls otherwise.
        assert (off[alive] > 1e-4).sum() <= 2
        assert not clips.stored(name).decode()[~torch.from_numpy(alive)].any()


def test_a_scheme_that_learns_its_shares_is_named_and_one_that_does_not_keeps_its_name():
    assert "lwc" not in parse_scheme("duquant-4bit").spec
    learned = parse_scheme("duquant-4bit:lwc=true")
    assert parse_scheme(learned.spec) == learned
    assert learned.calibration is Calibration.WHOLE_BLOCK
