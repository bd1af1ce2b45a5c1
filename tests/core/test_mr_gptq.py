"""MR-GPTQ by its definition in double precision, and NVFP4 behind a rotation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard

from qaudit.core.floats import by_group
from qaudit.core.linears import Inputs, Linears
from qaudit.core.registry import parse_scheme
from qaudit.core.rotation import rotate, rotation
from tests.support.correlated import correlated_inputs

torch.set_num_threads(1)

POINTS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(values):
    """Round to 4-bit floats, ties to the even code."""
    distance = np.abs(np.abs(values)[..., None] - POINTS)
    ties = np.isclose(distance, distance.min(-1, keepdims=True), rtol=0, atol=1e-12)
    even = np.where(ties, np.arange(8) % 2, 2).argmin(-1)
    return np.sign(values) * POINTS[even]


def e4m3_table():
    codes = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes.double().numpy()


def searched(part_RK, form, g):
    """Return the best scale of each row of a group, by trying those the format has."""
    largest = np.abs(part_RK).max(1) / 6
    scales = np.empty(len(part_RK))
    for r, row in enumerate(part_RK):
        if form == "nvfp4":
            table = e4m3_table()
            usual = np.abs(table - largest[r] * g).argmin()
            candidates = table[max(usual - 18, 0) : usual + 1][::-1] / g
        else:
            usual = 2.0 ** (np.floor(np.log2(6 * largest[r])) - 2)
            candidates = usual * 2.0 ** np.array([0, 1, -1, -2])
        errors = [np.sum(np.abs(nearest(row / s) * s - row) ** 2.4) for s in candidates]
        scales[r] = candidates[int(np.argmin(errors))]
    return scales


def mr_gptq(weight, x, form, block=128, damp=0.01):
    """Return rotated weights rounded one column at a time, as published."""
    columns = weight.shape[1]
    size = {"nvfp4": 16, "mxfp4": 32}[form]
    turn = np.zeros((columns, columns))
    for a in range(0, columns, block):
        turn[a : a + block, a : a + block] = hadamard(block) / np.sqrt(block)
    weight, x = weight @ turn, x @ turn
    g = 448 * 6 / np.abs(weight).max()
    scales = [searched(weight[:, a : a + size], form, g) for a in range(0, columns, size)]
    hessian = x.T @ x
    order = np.argsort(-np.diag(hessian), kind="stable")
    hessian[np.diag_indices(columns)] += damp * np.diag(hessian).mean()
    upper = np.linalg.cholesky(np.linalg.inv(hessian[np.ix_(order, order)])).T
    left, result = weight[:, order].copy(), np.zeros_like(weight)
    for i, column in enumerate(order):
        scale = scales[column // size]
        result[:, column] = nearest(left[:, i] / scale) * scale
        left[:, i:] -= np.outer((left[:, i] - result[:, column]) / upper[i, i], upper[i, i:])
    return result, x


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_it_rounds_as_published(form):
    generator = np.random.default_rng(0)
    x = correlated_inputs(256, seed=1)
    weight = 0.02 * generator.standard_t(5, (24, 256))
    expected, turned = mr_gptq(weight, x, form)
    inputs = Inputs(
        torch.from_numpy(x.T @ x), torch.from_numpy(np.abs(x).mean(0)), len(x),
        torch.from_numpy(np.abs(x).max(0)),
    )  # fmt: skip
    linears = Linears({"linear": torch.from_numpy(weight)}, inputs)
    result = parse_scheme(f"mr-gptq:format={form}").quantize(linears).weights["linear"].numpy()
    # In float32 against double precision: a column at a tie goes the other way now and then, and
    # those behind it in its row follow.
    assert np.mean(np.isclose(result, expected, rtol=1e-5, atol=1e-9).all(1)) > 0.7
    exact = weight @ x.T

    def error(dense):
        return float(np.square(dense @ turned.T - exact).sum())

    assert error(result) == pytest.approx(error(expected), rel=0.02)


@given(st.integers(1, 400), st.sampled_from([16, 32, 128]))
def test_blocks_are_rotated_by_themselves(columns, size):
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(columns)).double()
    turned = by_group(x, size, rotate)
    for a in range(0, columns, size):
        part = x[:, a : a + size]
        assert torch.allclose(turned[:, a : a + size], part @ rotation(part.shape[1]), atol=1e-11)
    assert torch.allclose(by_group(turned, size, rotate), x, atol=1e-11)


def example(columns=320, seed=0):
    x = torch.from_numpy(correlated_inputs(columns, seed=seed)).float()
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: 0.02 * torch.randn(rows, columns, generator=generator)
        for name, rows in (("q_proj", 16), ("k_proj", 8))
    }
    return Linears(weights, Inputs(x.T @ x, x.abs().mean(0), len(x), x.abs().amax(0))), x


def output_error(scheme, linears, x):
    quantized = parse_scheme(scheme).quantize(linears)
    read = x if quantized.inputs is None else quantized.inputs(x)
    return sum(
        float((read @ quantized.weights[name].T - x @ weight.T).double().square().sum())
        for name, weight in linears.weights.items()
    )


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_gptq_and_searched_scales_are_nearer_than_rounding_to_nearest(form):
    linears, x = example()
    ours = output_error(f"mr-gptq:format={form}:act=16", linears, x)
    assert ours < 0.7 * output_error(f"{form}a16:rotate=true", linears, x)


def test_linears_read_together_share_the_scale_of_the_tensor():
    linears, _ = example()
    stored = parse_scheme("mr-gptq").quantize(linears).stored
    scales = {name: (one.tensor_scale, one.input_scale) for name, one in stored.items()}
    assert scales["q_proj"] == scales["k_proj"]


@pytest.mark.parametrize("scheme", ["mr-gptq", "nvfp4:rotate=true", "mr-gptq:block=32"])
def test_no_token_of_calibration_is_clipped_behind_a_rotation(scheme):
    linears, x = example()
    quantized = parse_scheme(scheme).quantize(linears)
    size = {"mr-gptq": 128, "mr-gptq:block=32": 32}.get(scheme, 320)
    turned, read = by_group(x, size, rotate), quantized.inputs(x)
    # The largest of a group of 16 comes back to within 1/16 of itself by its 8-bit scale, and by
    # 1/6 where the next code of a smaller scale is nearer.
    largest = turned.unflatten(1, (-1, 16)).abs().amax(-1)
    assert float((read.unflatten(1, (-1, 16)).abs().amax(-1) / largest - 1).abs().max()) < 0.2


def test_nvfp4_weights_behind_a_rotation_are_those_of_rotated_weights():
    linears, _ = example()
    turned = {name: by_group(one, 320, rotate) for name, one in linears.weights.items()}
    plain = parse_scheme("nvfp4a16").quantize(Linears(turned)).weights
    ours = parse_scheme("nvfp4a16:rotate=true").quantize(linears).weights
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_a_weight_that_overflows_shows_in_its_row():
    linears, _ = example()
    linears.weights["q_proj"][2, 5] = 3e38
    for form in ("nvfp4", "mxfp4"):
        weight = parse_scheme(f"mr-gptq:format={form}").quantize(linears).weights["q_proj"]
        assert not bool(weight[2].isfinite().all()) or float(weight[2].abs().max()) > 1e36
