"""8- and 4-bit floats against their definitions, number by number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core import floats
from qaudit.core.linears import Inputs, Linears
from qaudit.core.registry import parse_scheme

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


@given(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=20))
def test_e2m1_is_the_nearest_of_eight_magnitudes(values):
    rounded = floats.round_e2m1_(torch.tensor(values))
    assert rounded.tolist() == [nearest(value, E2M1) for value in values]


@given(st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=20))
def test_e4m3_is_the_nearest_of_its_table_and_clips(values):
    rounded = floats.e4m3(torch.tensor(values)).float()
    assert rounded.tolist() == [nearest(value, e4m3_table()) for value in values]


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
        [v for start in range(0, 70, 32) for v in mxfp4_slowly(row[start : start + 32], rule)]
        for row in values.tolist()
    ]
    stored = floats.MxFloat4Codes.of(values, rule=rule)
    assert stored.decode().tolist() == expected
    assert floats.mxfp4_groups(values, rule).tolist() == expected
    assert stored.nbits == 9 * (70 * 4 + 3 * 8)


def test_the_rules_of_mxfp4_differ_where_a_mantissa_is_above_seven_quarters():
    values = torch.zeros(1, 32)
    values[0, 0] = 1.9  # floor: at most 6 * 2^-2 = 1.5; even: 1.9 is rounded to 2
    assert floats.MxFloat4Codes.of(values, rule="floor").decode()[0, 0] == 1.5
    assert floats.MxFloat4Codes.of(values, rule="even").decode()[0, 0] == 2.0


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


def test_fp8_scales_of_rows_and_squares():
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


def test_linears_read_together_share_the_scale_of_nvfp4():
    small, large = weight(seed=1), weight(magnitude=3.0, seed=2)
    stored = parse_scheme("nvfp4a16").quantize(Linears({"q": small, "k": large})).stored
    assert torch.equal(stored["q"].tensor_scale, stored["k"].tensor_scale)
    assert torch.equal(stored["q"].tensor_scale, floats.tensor_scale(large.abs().amax()))


def test_the_scale_of_nvfp4_activations_is_that_of_calibration():
    x = torch.randn(50, 70, generator=torch.Generator().manual_seed(3))
    inputs = Inputs(x.T @ x, x.abs().mean(0), 50, x.abs().amax(0))
    quantized = parse_scheme("nvfp4").quantize(Linears({"q": weight()}, inputs))
    expected = floats.nvfp4_groups(x[:4], floats.tensor_scale(x.abs().amax()))
    assert torch.equal(quantized.inputs(x[:4]), expected)


@pytest.mark.parametrize("scale", [2.0**-12, 1e-3, 0.3, 1.0, 7.0, 900.0])
def test_rounding_by_mantissa_is_rounding_to_every_representable_number(scale):
    x = scale * torch.randn(4000, generator=torch.Generator().manual_seed(0))
    exact = torch.arange(-4000, 4001) * 2.0**-10  # ties of every binade are among them
    x = torch.cat([x, exact, torch.tensor([0.0, -0.0, 448.0, 463.9, 1e30, -1e30])])
    assert torch.equal(floats.round_e4m3_(x.clone()), floats.e4m3(x).float())
    values = torch.tensor([-v for v in E2M1[:0:-1]] + list(E2M1))
    distance = (x.clamp(-6, 6)[:, None] - values).abs()
    rounded = floats.round_e2m1_(x.clone())
    assert torch.isin(rounded, values).all()
    assert torch.equal((x.clamp(-6, 6) - rounded).abs(), distance.amin(1))
    ties = (distance == distance.amin(1, keepdim=True)).sum(1) > 1
    assert bool(ties.any())
    even = torch.tensor([0.0, 1.0, 2.0, 4.0])  # codes without a mantissa bit
    assert torch.isin(rounded[ties].abs(), even).all()
    assert floats.round_e2m1_(torch.tensor([float("nan")])).isnan().all()


@pytest.mark.parametrize("spec", ["int8", "fp8", "fp8:blocks=true", "mxfp4"])
def test_large_batches_are_rounded_in_parts_and_not_in_place(spec):
    inputs = parse_scheme(spec).quantize(Linears({"q": torch.randn(2, 300)})).inputs
    x = torch.randn(3, 200, 300, generator=torch.Generator().manual_seed(4))
    given, tokens = x.clone(), []

    def counted(part):
        tokens.append(part.numel() // 300)
        return inputs(part)

    assert torch.equal(floats.in_parts(x, counted), inputs(x))
    assert torch.equal(x, given)
    assert len(tokens) > 1
    assert sum(tokens) == 600


def test_every_code_of_8_bit_floats_is_what_torch_reads():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    values = floats.Float8Codes(codes, torch.ones(1, 1)).decode()
    assert torch.equal(values.nan_to_num(500.0), codes.float().nan_to_num(500.0))
