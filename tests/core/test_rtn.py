import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Linears


def plain_rtn(weight_RC, bits, group, symmetric):
    """Round one number at a time, in the arithmetic of the given dtype."""
    rows, columns = weight_RC.shape
    group = columns if group == -1 else group
    result = np.zeros_like(weight_RC)
    number = weight_RC.dtype.type
    for row in range(rows):
        for start in range(0, columns, group):
            part = weight_RC[row, start : start + group]
            low, high = min(part.min(), number(0)), max(part.max(), number(0))
            if symmetric:
                high = max(-low, high)
                low = -high
            if low == high:
                low, high = number(-1), number(1)
            scale = number((high - low) / number(2**bits - 1))
            zero = 2 ** (bits - 1) if symmetric else np.round(-low / scale)
            for offset, value in enumerate(part):
                code = min(max(np.round(value / scale) + zero, 0), 2**bits - 1)
                result[row, start + offset] = (code - zero) * scale
    return result


def rounded(weight, bits, group, symmetric):
    scheme = parse_scheme(f"rtn-{bits}bit:group={group}:sym={symmetric}")
    return scheme.quantize(Linears({"w": torch.from_numpy(weight)})).weights["w"].numpy()


@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.integers(2, 8),
    group=st.sampled_from([-1, 1, 5, 8, 64]),
    symmetric=st.booleans(),
    kind=st.sampled_from(["normal", "positive", "negative", "sparse"]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_equals_rounding_one_number_at_a_time_bit_for_bit(
    seed, bits, group, symmetric, kind, dtype
):
    weight = np.random.default_rng(seed).standard_normal((3, 13))
    weight = {
        "normal": weight,
        "positive": np.abs(weight),
        "negative": -np.abs(weight),
        "sparse": np.where(weight > 1, weight, 0),
    }[kind].astype(dtype)
    found = rounded(weight, bits, group, symmetric)
    np.testing.assert_array_equal(found, plain_rtn(weight, bits, group, symmetric))


@pytest.mark.parametrize("symmetric", [True, False])
def test_rounding_twice_changes_nothing_where_the_range_is_kept(symmetric):
    weight = np.random.default_rng(0).standard_normal((4, 64))
    weight[:, 0], weight[:, 1] = 5.0, -5.0
    once = rounded(weight, 8, -1, symmetric)
    assert np.abs(once - weight).max() <= 10.0 / 255 * (1 + 1e-9)


def test_a_group_of_one_sign_uses_its_whole_range():
    # GPTQModel halves the scale of such a symmetric group and clips its upper half.
    weight = np.linspace(0.5, 1.0, 8)[None]
    assert np.abs(rounded(weight, 4, -1, True) - weight).max() <= 2.0 / 15 / 2 + 1e-12


def test_half_precision_weights_are_rounded_in_single_precision():
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scheme = parse_scheme("rtn-4bit:group=32")
    found = scheme.quantize(Linears({"w": weight})).weights["w"]
    expected = scheme.quantize(Linears({"w": weight.float()})).weights["w"].bfloat16()
    assert torch.equal(found, expected)


def test_the_smallest_numbers_there_are_do_not_divide_by_zero():
    weight = np.array([[1e-45, -1e-45, 0.0, 0.0]], dtype=np.float32)
    found = rounded(weight, 8, -1, True)
    assert np.isfinite(found).all()
    assert np.abs(found).max() <= 3e-45


def test_each_linear_is_counted_and_noted_once():
    weights = {name: torch.ones(2, 10) for name in ("a", "b")}
    quantized = parse_scheme("rtn-4bit:group=4").quantize(Linears(weights))
    assert quantized.bits == 2 * 2 * (10 * 4 + 3 * 16)
    assert quantized.notes == ("groups of 4 over 10 columns leave a last group of 2",)
