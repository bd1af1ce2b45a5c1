"""What every registered merge must keep. A new file in `core/merges/` is tested by being there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.registry import merges, parse_merge
from qaudit.errors import SourceError, UsageError

every_merge = pytest.mark.parametrize("name", merges())
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def members(count, shape=(5, 7), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


@every_merge
def test_the_text_form_reads_back_as_the_merge(name):
    merge = parse_merge(name)
    assert parse_merge(merge.spec) == merge
    assert merge.name == name


@every_merge
def test_a_merge_is_documented_and_versioned(name):
    plugin = merges()[name]
    first = (plugin.__doc__ or "").strip().splitlines()[0]
    assert first.endswith(".")
    assert not first.startswith(plugin.__name__ + "(")
    assert plugin.version >= 1


@every_merge
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_member_comes_back_unchanged(name, dtype):
    (only,) = members(1, dtype=dtype)
    merged = parse_merge(name).merge([only], [0.3])
    assert torch.equal(merged, only)
    assert merged.dtype == dtype
    merged.add_(1)
    assert not torch.equal(merged, only)  # a copy


@every_merge
@pytest.mark.parametrize("dtype", DTYPES)
def test_shape_and_dtype_are_those_of_the_first_and_members_are_not_touched(name, dtype):
    given_members, copies = members(3, dtype=dtype), members(3, dtype=dtype)
    merged = parse_merge(name).merge(given_members, [1.0, 2.0, 1.0])
    assert merged.dtype == dtype
    assert merged.shape == given_members[0].shape
    assert all(torch.equal(a, b) for a, b in zip(given_members, copies, strict=True))


@every_merge
def test_the_same_members_give_the_same_bits_twice(name):
    merge = parse_merge(name)
    assert torch.equal(merge.merge(members(4), [1.0] * 4), merge.merge(members(4), [1.0] * 4))


@every_merge
def test_members_that_agree_are_their_merge(name):
    one = members(1)[0]
    assert torch.equal(parse_merge(name).merge([one, one, one], [1 / 3] * 3), one)


@every_merge
def test_another_dtype_can_be_asked_for(name):
    merged = parse_merge(name).merge(members(2, dtype=torch.bfloat16), [1, 1], dtype=torch.float32)
    assert merged.dtype == torch.float32


@every_merge
@pytest.mark.parametrize(("count", "weights"), [(0, []), (2, [1.0]), (2, [1.0, -1.0])])
def test_weights_that_make_no_soup_are_refused(name, count, weights):
    with pytest.raises(UsageError):
        parse_merge(name).merge(members(count), weights)


@every_merge
def test_members_of_different_shape_are_refused(name):
    with pytest.raises(SourceError, match="differ in shape"):
        parse_merge(name).merge([torch.zeros(2, 3), torch.zeros(3, 2)], [1.0, 1.0])


@given(st.integers(0, 2**32 - 1), st.lists(st.floats(0.01, 10), min_size=2, max_size=6))
def test_mean_equals_the_sum_in_double_precision_in_order(seed, weights):
    tensors = members(len(weights), dtype=torch.float64, seed=seed)
    expected = np.zeros((5, 7))
    for tensor, weight in zip(tensors, weights, strict=True):
        expected = expected + tensor.numpy() * weight
    expected = expected / sum(weights)
    found = parse_merge("mean").merge(tensors, weights).numpy()
    # Equal but for a fused multiply-add, which rounds once where numpy rounds twice.
    np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-15)


def test_mean_keeps_what_a_half_precision_sum_would_lose():
    # Summed in bf16, 256 + 1 is 256; in double precision the mean of 256 and 1, 1, 1, 1 is 52.
    tensors = [torch.full((2,), value, dtype=torch.bfloat16) for value in (256.0, 1, 1, 1, 1)]
    assert parse_merge("mean").merge(tensors, [1.0] * 5).tolist() == [52.0, 52.0]


def test_mean_does_not_depend_on_how_a_tensor_is_sliced(monkeypatch):
    tensors = members(3, shape=(31, 17))
    whole = parse_merge("mean").merge(tensors, [0.2, 0.3, 0.5])
    monkeypatch.setattr("qaudit.core.merges.mean.SLICE", 10)
    assert torch.equal(whole, parse_merge("mean").merge(tensors, [0.2, 0.3, 0.5]))


def test_mean_reads_members_that_are_not_contiguous():
    tensors = [tensor.T for tensor in members(2)]
    expected = (tensors[0].double() + tensors[1].double()) / 2
    assert torch.equal(parse_merge("mean").merge(tensors, [1, 1]), expected.float())
