"""8- and 4-bit floats against their definitions, number by number, and MR-GPTQ behind rotations."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard

from qaudit.core import floats
from qaudit.core.floats import by_group
from qaudit.core.linears import Inputs, Linears
from qaudit.core.registry import parse_scheme
from qaudit.core.rotation import rotate, rotation
from tests.support.problems import correlated_inputs

torch.set_num_threads(1)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest(value, table):
    """Round to a table by searching it; of two neighbours as near the one of the even code."""
    distances = [abs(abs(value) - entry) for entry in table]
    best = [k for k, distance in enumerate(distances) if distance == min(distances)]
    return math.copysign(table[next((k for k in best if k % 2 == 0), best[0])], value)


def e4m3_table():
    """All 127 magnitudes of e4m3, by its definition: bias 7, subnormals of 2^-9, no infinity."""
    subnormals = [m * 2.0**-9 for m in range(8)]
    normals = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return (subnormals + normals)[:-1]


@given(st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=20))
def test_floats_are_the_nearest_of_their_tables_and_clip(values):
    rounded = floats.e4m3(torch.tensor(values)).float()
    assert rounded.tolist() == [nearest(value, e4m3_table()) for value in values]
    small = (torch.tensor(values) / 50).tolist()  # to -10 and 10
    assert floats.round_e2m1_(torch.tensor(small)).tolist() == [nearest(v, E2M1) for v in small]


def weight(rows=9, columns=70, magnitude=0.02, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = magnitude * torch.randn(rows, columns, generator=generator)
    values[2] = 0
    return values


def mxfp4_slowly(values, rule):
    largest = max(abs(v) for v in values)
    if largest == 0:
        return [0.0] * len(values)
    power = math.floor(math.log2(largest))
    if rule == "even" and largest >= 1.75 * 2.0**power:
        power += 1
    scale = 2.0 ** (power - 2)
    return [nearest(v / scale, E2M1) * scale for v in values]


@pytest.mark.parametrize("rule", ["even", "floor"])
@pytest.mark.parametrize("magnitude", [1e-6, 0.02, 50.0])
def test_mxfp4_group_by_group(rule, magnitude):
    values = weight(magnitude=magnitude)
    expected = [
        [v for a in range(0, 70, 32) for v in mxfp4_slowly(row[a : a + 32], rule)]
        for row in values.tolist()
    ]
    stored = floats.MxFloat4Codes.of(values, rule=rule)
    assert stored.decode().tolist() == expected
    assert floats.mxfp4_groups(values, rule).tolist() == expected
    assert stored.nbits == 9 * (70 * 4 + 3 * 8)
    above = torch.zeros(1, 32)
    above[0, 0] = 1.9  # floor: at most 6 * 2^-2 = 1.5; even: 1.9 is rounded to 2
    wanted = {"floor": 1.5, "even": 2.0}[rule]
    assert floats.MxFloat4Codes.of(above, rule=rule).decode()[0, 0] == wanted


def nvfp4_slowly(values, g):
    f32 = torch.tensor
    largest = f32(max(abs(v) for v in values))
    code = nearest(float(f32(g) * (largest / 6.0)), e4m3_table()) or 0.125
    scale = float(f32(code) / f32(g))
    ratio = [float(f32(v) / f32(scale)) for v in values]
    return [float(f32(nearest(r, E2M1)) * f32(scale)) for r in ratio]


def test_nvfp4_group_by_group():
    values = weight()
    g = float(torch.tensor(448.0 * 6) / values.abs().max())
    expected = [
        [v for start in range(0, 70, 16) for v in nvfp4_slowly(row[start : start + 16], g)]
        for row in values.tolist()
    ]
    scale = floats.tensor_scale(values.abs().amax())
    assert float(scale) == g
    assert floats.NvFloat4Codes.of(values, scale, None).decode().tolist() == expected
    assert floats.nvfp4_groups(values, scale).tolist() == expected


def test_fp8_has_scales_of_rows_and_squares_and_codes_that_torch_reads():
    values = weight(140, 200)
    rows = floats.Float8Codes.of(values, squares=False)
    largest = values.abs().amax(1)
    assert torch.equal(rows.scales[:, 0], torch.where(largest == 0, 1.0, largest / 448))
    squares = floats.Float8Codes.of(values, squares=True)
    assert squares.scales.shape == (2, 2)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        part = values[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        scale = part.abs().max() / 448
        assert squares.scales[i, j] == scale
        decoded = squares.decode()[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        assert torch.equal(decoded, floats.e4m3(part / scale).float() * scale)
    assert rows.nbits == 140 * 200 * 8 + 140 * 32
    assert squares.nbits == 140 * 200 * 8 + 4 * 32
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    values = floats.Float8Codes(codes, torch.ones(1, 1)).decode()
    assert torch.equal(values.nan_to_num(500.0), codes.float().nan_to_num(500.0))


def test_the_scale_of_nvfp4_activations_is_that_of_calibration():
    x = torch.randn(50, 70, generator=torch.Generator().manual_seed(3))
    inputs = Inputs(x.T @ x, x.abs().mean(0), 50, x.abs().amax(0))
    quantized = parse_scheme("nvfp4").quantize(Linears({"q": weight()}, inputs))
    expected = floats.nvfp4_groups(x[:4], floats.tensor_scale(x.abs().amax()))
    assert torch.equal(quantized.inputs(x[:4]), expected)


def test_rounding_by_mantissa_is_rounding_to_every_representable_number():
    x = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    exact = torch.arange(-4000, 4001) * 2.0**-10  # ties of every binade are among them
    ends = torch.tensor([0.0, -0.0, 448.0, 463.9, 1e30, -1e30])
    x = torch.cat([*(scale * x for scale in (2.0**-12, 1e-3, 0.3, 7.0, 900.0)), exact, ends])
    assert torch.equal(floats.round_e4m3_(x.clone()), floats.e4m3(x).float())
    eighths = torch.arange(-64, 65) / 8  # of four bits: all ties
    expected = [nearest(value, E2M1) for value in eighths.tolist()]
    assert floats.round_e2m1_(eighths).tolist() == expected
    assert floats.round_e2m1_(torch.tensor([float("nan")])).isnan().all()


@pytest.mark.parametrize("spec", ["int8", "fp8", "fp8:blocks=true", "mxfp4"])
def test_large_batches_are_rounded_in_parts_and_not_in_place(spec):
    inputs = parse_scheme(spec).quantize(Linears({"q": torch.randn(2, 300)})).inputs
    x = torch.randn(3, 200, 300, generator=torch.Generator().manual_seed(4))
    given, counted = x.clone(), mock.Mock(wraps=inputs)
    assert torch.equal(floats.in_parts(x, counted), inputs(x))
    assert torch.equal(x, given)
    tokens = [call.args[0].numel() // 300 for call in counted.call_args_list]
    assert len(tokens) > 1
    assert sum(tokens) == 600


# --------------------------------------------------------------------------------------------------
# MR-GPTQ, and 4-bit floats behind a rotation.


def nearest_of_many(values):
    """Round to 4-bit floats, ties to the even code, up to the rounding of double precision."""
    distance = np.abs(np.abs(values)[..., None] - np.array(E2M1))
    ties = np.isclose(distance, distance.min(-1, keepdims=True), rtol=0, atol=1e-12)
    even = np.where(ties, np.arange(8) % 2, 2).argmin(-1)
    return np.sign(values) * np.array(E2M1)[even]


def searched(part_RK, form, g):
    """Return the best scale of each row of a group, by trying those the format has."""
    largest = np.abs(part_RK).max(1) / 6
    scales = np.empty(len(part_RK))
    for r, row in enumerate(part_RK):
        if form == "nvfp4":
            table = np.array(e4m3_table()[1:])
            usual = np.abs(table - largest[r] * g).argmin()
            candidates = table[max(usual - 18, 0) : usual + 1][::-1] / g
        else:
            usual = 2.0 ** (np.floor(np.log2(6 * largest[r])) - 2)
            candidates = usual * 2.0 ** np.array([0, 1, -1, -2])
        errors = [np.sum(np.abs(nearest_of_many(row / s) * s - row) ** 2.4) for s in candidates]
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
        result[:, column] = nearest_of_many(left[:, i] / scale) * scale
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
    rows = {"q_proj": 16, "k_proj": 8}
    weights = {n: 0.02 * torch.randn(r, columns, generator=generator) for n, r in rows.items()}
    return Linears(weights, Inputs(x.T @ x, x.abs().mean(0), len(x), x.abs().amax(0))), x


def test_linears_read_together_share_the_scale_of_nvfp4():
    small, large = weight(seed=1), weight(magnitude=3.0, seed=2)
    stored = parse_scheme("nvfp4a16").quantize(Linears({"q": small, "k": large})).stored
    assert torch.equal(stored["q"].tensor_scale, stored["k"].tensor_scale)
    assert torch.equal(stored["q"].tensor_scale, floats.tensor_scale(large.abs().amax()))
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
