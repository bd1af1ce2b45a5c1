"""What every registered merge must keep. A new file in `core/merges/` is tested by being there."""

import itertools
import math

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


def enough(name):
    """Return how many members to try a merge with."""
    plugin = merges()[name]
    return plugin.most or max(3, plugin.fewest)


@every_merge
def test_a_merge_reads_back_from_its_text_and_is_documented_and_versioned(name):
    merge, plugin = parse_merge(name), merges()[name]
    assert parse_merge(merge.spec) == merge
    assert merge.name == name
    first = (plugin.__doc__ or "").strip().splitlines()[0]
    assert first.endswith(".")
    assert not first.startswith(plugin.__name__ + "(")
    assert plugin.version >= 1


@every_merge
@pytest.mark.parametrize("dtype", DTYPES)
def test_shape_and_dtype_are_those_of_the_first_and_members_are_not_touched(name, dtype):
    count, merge = enough(name), parse_merge(name)
    given_members, copies = members(count, dtype=dtype), members(count, dtype=dtype)
    weights = [1.0, 2.0, 1.0][:count]
    merged = merge.merge(given_members, weights)
    assert merged.dtype == dtype
    assert merged.shape == given_members[0].shape
    assert all(torch.equal(a, b) for a, b in zip(given_members, copies, strict=True))
    (only,) = members(1, dtype=dtype)
    merged = merge.merge([only], [0.3])
    assert torch.equal(merged, only)
    assert merged.dtype == dtype
    merged.add_(1)
    assert not torch.equal(merged, only)  # a copy


@every_merge
def test_the_number_of_threads_changes_no_bit(name):
    merge, count = parse_merge(name), enough(name)
    tensors, threads = members(count, shape=(300, 1000)), torch.get_num_threads()
    alone = merge.merge(tensors, [1.0] * count)
    try:
        torch.set_num_threads(4)
        assert torch.equal(alone, merge.merge(tensors, [1.0] * count))
    finally:
        torch.set_num_threads(threads)


@every_merge
def test_every_candidate_has_a_share_and_members_that_agree_are_their_merge(name):
    count, merge = enough(name), parse_merge(name)
    shares = merge.shares([100 * n for n in range(max(6, count))][: merges()[name].most])
    assert math.isclose(sum(shares), 1.0)
    one = members(1)[0]
    assert torch.equal(merge.merge([one] * count, [1 / count] * count), one)


@every_merge
def test_weights_that_make_no_soup_and_members_of_different_shape_are_refused(name):
    for count, weights in ((0, []), (2, [1.0]), (2, [1.0, -1.0])):
        with pytest.raises(UsageError):
            parse_merge(name).merge(members(count), weights)
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


def test_mean_sums_in_double_precision_however_a_tensor_is_sliced_or_laid_out(monkeypatch):
    # Summed in bf16, 256 + 1 is 256; in double precision the mean of 256 and 1, 1, 1, 1 is 52.
    merge = parse_merge("mean").merge
    tensors = [torch.full((2,), value, dtype=torch.bfloat16) for value in (256.0, 1, 1, 1, 1)]
    assert merge(tensors, [1.0] * 5).tolist() == [52.0, 52.0]
    tensors = [tensor.T for tensor in members(2)]
    expected = (tensors[0].double() + tensors[1].double()) / 2
    assert torch.equal(merge(tensors, [1, 1]), expected.float())
    tensors = members(3, shape=(31, 17))
    whole = merge(tensors, [0.2, 0.3, 0.5])
    monkeypatch.setattr("qaudit.core.merge.SLICE", 10)
    assert torch.equal(whole, merge(tensors, [0.2, 0.3, 0.5]))


# ------------------------------------------------------------------------------ each by itself


@given(st.lists(st.floats(-2, 3), min_size=2, max_size=5), st.integers(0, 99))
def test_free_weights_are_used_as_they_are(weights, seed):
    if abs(sum(weights)) < 1e-3:
        return
    tensors = members(len(weights), dtype=torch.float64, seed=seed)
    expected = sum(w * t for w, t in zip(weights, tensors, strict=True))
    found = parse_merge("weighted:free=true").merge(tensors, weights)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("text", "asked", "given_", "sentence"),
    [
        ("weighted", "accept", [0.9, 0.2], "the weights sum to 1.1, not to 1"),
        ("weighted", "accept", [1.0, -1.0], "weights that sum to 0"),
        ("weighted:scaled=true", "accept", [math.inf, 1.0], "weights that sum to inf"),
        ("mean", "accept", [0.5, 0.5], "`mean` takes no weights"),
        ("lawa", "accept", [0.5, 0.5], "`lawa` takes no weights"),
        ("lawa:k=1", "accept", [], "k"),
        ("lawa:every=-1", "accept", [], "every"),
        ("ema:decay=1", "accept", [], "decay"),
        ("slerp:t=2", "accept", [], "t"),
        ("lawa:k=5", "shares", [1, 2, 3], "a window of 5 is longer than the series, which has 3"),
        ("lawa:k=3:every=150", "shares", [100, 200, 300, 400], "no checkpoint at step 250"),
        ("lawa:k=2:every=9", "shares", [None, None], "no step to count back from"),
        ("slerp", "members", [1.0] * 3, "and there are 3"),
        ("stock", "members", [1.0] * 2, "two members or more"),
    ],
)
def test_what_a_merge_cannot_mean_is_refused(text, asked, given_, sentence):
    with pytest.raises(UsageError, match=sentence):
        merge = parse_merge(text)
        if asked == "members":
            merge.merge(members(len(given_)), given_)
        else:
            getattr(merge, asked)(given_)


def test_weights_that_sum_to_one_or_need_not_are_taken():
    parse_merge("weighted").accept([0.333333, 0.333333, 0.333334])
    parse_merge("weighted:scaled=true").accept([3, 1])
    parse_merge("weighted:free=true").accept([1.5, -0.2])


def test_a_window_takes_the_latest_or_those_so_many_steps_apart():
    steps = [100, 200, 300, 400, 500]
    assert parse_merge("lawa:k=2").shares(steps) == (0, 0, 0, 0.5, 0.5)
    assert parse_merge("lawa:k=3:every=200").shares(steps) == (1 / 3, 0, 1 / 3, 0, 1 / 3)


@given(st.floats(0.01, 0.99), st.integers(2, 9))
def test_ema_is_the_running_average_written_out(decay, count):
    tensors = members(count, dtype=torch.float64)
    running = tensors[0].clone()
    for tensor in tensors[1:]:
        running = decay * running + (1 - decay) * tensor
    merge = parse_merge(f"ema:decay={decay!r}")
    found = merge.merge(tensors, merge.shares([None] * count))
    # Two roundings a step in the one, two a member in the other.
    torch.testing.assert_close(found, running, rtol=1e-12, atol=1e-13)


@given(st.floats(0, 1), st.integers(0, 99))
def test_slerp_keeps_lengths_and_moves_at_an_even_pace(t, seed):
    a, b = (tensor / tensor.norm() for tensor in members(2, dtype=torch.float64, seed=seed))
    merged = parse_merge(f"slerp:t={t!r}").merge([a, b], [1 - t, t])
    angle = math.acos(float((a * b).sum()))
    assert math.isclose(float(merged.norm()), 1.0, rel_tol=1e-9)
    # acos loses half the digits near an angle of zero.
    assert math.isclose(math.acos(min(1.0, float((a * merged).sum()))), t * angle, abs_tol=1e-7)


def test_slerp_between_the_same_direction_is_a_line_and_stock_stays_at_its_anchor_when_orthogonal():
    a = members(1, dtype=torch.float64)[0]
    merged = parse_merge("slerp:t=0.25").merge([a, 3 * a], [0.75, 0.25])
    torch.testing.assert_close(merged, 1.5 * a)
    anchor = torch.zeros(4, dtype=torch.float64)
    merged = parse_merge("stock").merge([anchor, *torch.eye(4, dtype=torch.float64)[:3]], [1] * 4)
    assert torch.equal(merged, anchor)


def plain_stock(anchor, others):
    """Model stock as its paper writes it, with dense vectors."""
    deltas = [(other - anchor).flatten() for other in others]
    cosines = [
        float(torch.nn.functional.cosine_similarity(a, b, dim=0))
        for a, b in itertools.combinations(deltas, 2)
    ]
    cosine, count = max(0.0, sum(cosines) / len(cosines)), len(others)
    t = count * cosine / ((count - 1) * cosine + 1)
    return (1 - t) * anchor + t * sum(others) / count


@given(st.integers(2, 5), st.floats(0, 3), st.integers(0, 99))
def test_stock_equals_its_paper(count, common, seed):
    anchor, shared, *noise = members(count + 2, dtype=torch.float64, seed=seed)
    others = [anchor + common * shared + part for part in noise]
    found = parse_merge("stock").merge([anchor, *others], [1.0] * (count + 1))
    torch.testing.assert_close(found, plain_stock(anchor, others), rtol=1e-10, atol=1e-11)
