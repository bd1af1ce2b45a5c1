"""What weights look like, against scipy and plain loops.

Tolerances: everything is added up in float64 from the same float32 numbers, so that two ways of
adding differ by rounding alone: 1e-9 is far above it for a few thousand weights, and far below
anything that is printed.
"""

import math
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme
from qaudit.diagnostics import weights_measure as w
from qaudit.diagnostics.diagnostic import role_of
from qaudit.diagnostics.weights_measure import WeightStatistics, difference, joined, sums_of

ASKED = WeightStatistics(group=16, sym=False, outlier=3.0)


def matrix(seed=0, rows=12, columns=40, freedom=4.0):
    generator = np.random.default_rng(seed)
    drawn = 0.02 * generator.standard_t(freedom, (rows, columns)) + 0.003
    return torch.from_numpy(drawn.astype(np.float32))


def columns(weight_RC, bits=(), asked=ASKED):
    return sums_of(weight_RC, asked, bits).columns()


def test_the_kurtosis_is_that_of_scipy_by_parts_too(monkeypatch):
    expected = stats.kurtosis(matrix().double().numpy(), axis=None, fisher=True, bias=True)
    assert columns(matrix())["kurtosis"] == pytest.approx(expected, rel=1e-9)
    whole = sums_of(matrix(), ASKED, (3,), matrix(1))
    monkeypatch.setattr(w, "_AT_ONCE", 90)  # two rows
    parts = sums_of(matrix(), ASKED, (3,), matrix(1))
    for name, value in vars(whole).items():
        assert vars(parts)[name] == pytest.approx(value, rel=1e-12, abs=1e-18), name


@pytest.mark.parametrize("count", [2, 5])
def test_tensors_put_together_are_one_large_tensor(count):
    several = [matrix(k, rows=4 + k, freedom=3 + k) * (k + 1) for k in range(count)]
    together = reduce(joined, [sums_of(weight_RC, ASKED, (3, 4)) for weight_RC in several])
    whole = sums_of(torch.cat(several), ASKED, (3, 4))
    for name in ("count", "mean", "second", "third", "fourth", "grid"):
        assert getattr(together, name) == pytest.approx(getattr(whole, name), rel=1e-9), name
    for name in ("ranges", "groups", "square"):
        assert together.totals[name] == pytest.approx(whole.totals[name], rel=1e-9), name
    assert together.columns()["kurtosis"] == pytest.approx(whole.columns()["kurtosis"], rel=1e-9)


def plain_groups(weight_RC, group):
    rows = weight_RC.double().numpy()
    return [row[c : c + group] for row in rows for c in range(0, len(row), group)]


def test_outliers_and_the_effective_range_are_those_of_plain_loops():
    weight_RC = matrix(3)
    flat = weight_RC.double().numpy().ravel()
    beyond = np.abs(flat - flat.mean()) > 3 * flat.std()
    assert 0 < beyond.sum() < len(flat) / 10
    assert columns(weight_RC)["outlier_share"] == beyond.mean()
    groups = plain_groups(weight_RC, 16)
    assert {len(g) for g in groups} == {16, 8}  # the last one is ragged
    expected = np.mean([(g.max() - g.min()) / g.std() for g in groups])
    assert columns(weight_RC)["effective_range"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_distance_to_the_grid_is_that_of_a_plain_loop(bits, symmetric):
    weight_RC, steps = matrix(7), []
    for group in plain_groups(weight_RC, 16):
        low, high = min(group.min(), 0), max(group.max(), 0)
        if symmetric:
            low, high = -max(-low, high), max(-low, high)
        scale = (high - low) / (2**bits - 1)
        first = -(2 ** (bits - 1)) if symmetric else -np.round(-low / scale)
        codes = np.clip(np.round(group / scale), first, first + 2**bits - 1)
        steps += list(group / scale - codes)
    asked = WeightStatistics(group=16, sym=symmetric)
    found = columns(weight_RC, (bits,), asked)["grid_distance"][str(bits)]
    assert found == pytest.approx(math.sqrt(np.mean(np.square(steps))), rel=1e-9)


def test_distances_shapes_and_changes_are_those_of_their_definitions():
    scheme = parse_scheme("rtn-3bit:group=16:sym=false:scale_dtype=float32")
    rounded = scheme.quantize(Linears({"w": matrix(2)})).weights["w"]
    assert columns(rounded, (3,))["grid_distance"]["3"] == pytest.approx(0, abs=1e-5)
    assert columns(matrix(2), (3,))["grid_distance"]["3"] == pytest.approx(12**-0.5, rel=0.1)
    flat = columns(torch.full((3, 20), 0.25), (3,))
    assert (flat["kurtosis"], flat["effective_range"], flat["outlier_share"]) == (None, None, 0.0)
    assert columns(torch.zeros(3, 20), (3,))["grid_distance"] == {"3": 0.0}
    weight_RC, before_RC = matrix(1), matrix(2)
    moved = parse_scheme("rtn-3bit:group=16").quantize(Linears({"w": weight_RC})).weights["w"]
    a, b, c = (x.double().numpy() for x in (weight_RC, moved, before_RC))
    found = sums_of(weight_RC, ASKED, (), before_RC)
    change = math.sqrt(difference(moved, weight_RC) / found.totals["square"])
    assert change == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-9)
    expected = np.linalg.norm(a - c) / np.linalg.norm(c)
    assert found.columns()["movement"] == pytest.approx(expected, rel=1e-9)
    assert joined(found, sums_of(weight_RC, ASKED, ())).columns()["movement"] is None


@settings(max_examples=25)
@given(st.integers(0, 99), st.floats(0.05, 20), st.floats(-5, 5))
def test_shapes_ignore_scale_and_shift_and_distances_scale(seed, scale, shift):
    """Between two points of the grid, rounding of the scale may send a weight to either."""
    plain = sums_of(matrix(seed).double(), ASKED, (3,))
    moved = sums_of(scale * (matrix(seed).double() + shift), ASKED, ())
    scaled = sums_of(scale * matrix(seed).double(), ASKED, (3,))
    for name in ("kurtosis", "effective_range"):
        assert moved.columns()[name] == pytest.approx(plain.columns()[name], rel=1e-6)
    assert moved.totals["outliers"] == plain.totals["outliers"]
    distance = plain.columns()["grid_distance"]["3"]
    assert scaled.columns()["grid_distance"]["3"] == pytest.approx(distance, rel=1e-6)


def test_roles_are_the_same_whatever_a_family_calls_them():
    names = {
        "self_attn.q_proj": "q", "attention.query_key_value": "qkv", "attention.dense": "o",
        "attn.c_proj": "o", "mlp.c_proj": "down", "mlp.dense_4h_to_h": "down",
        "mlp.gate_proj": "gate", "mlp.router": "router",
    }  # fmt: skip
    assert {name: role_of(name) for name in names} == names
