"""Divergence, agreement and losses of rows, held against their definitions in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from qaudit.core import fidelity
from qaudit.core.fidelity import (
    Reference,
    divergence,
    draw,
    drawn_log_probability,
    head_rows,
    log_probabilities,
    losses,
    row_parts,
)
from tests.support.pretended_device import pretended

pytestmark = pytest.mark.property


def rows(seed, count=6, vocabulary=400, scale=3.0, noise=0.1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    p_NV = torch.randn(count, vocabulary, generator=generator) * scale
    q_NV = p_NV + torch.randn(count, vocabulary, generator=generator) * noise
    targets_N = torch.randint(0, vocabulary, (count,), generator=generator)
    return p_NV.to(dtype), q_NV.to(dtype), targets_N


TRUSTED = 0.9 * fidelity._TRUSTED  # a little less: the estimate is rounded, too


def rounding(p_NV, q_NV):
    """Return what a divergence made of sums in float32 may err by, row by row."""
    moved_N = (p_NV.double().softmax(-1) * (q_NV.double() - p_NV.double())).sum(-1)
    return 5e-7 * (1 + moved_N.abs().numpy())


def plain(p_NV, q_NV, targets_N):
    """Return divergence, losses and agreement by their definitions, in numpy's float64."""
    logs = []
    for z_NV in (p_NV, q_NV):
        z_NV = z_NV.double().numpy()
        highest_N1 = z_NV.max(1, keepdims=True)
        logs.append(z_NV - highest_N1 - np.log(np.exp(z_NV - highest_N1).sum(1, keepdims=True)))
    logp_NV, logq_NV = logs
    kl_N = (np.exp(logp_NV) * (logp_NV - logq_NV)).sum(1)
    nll_N = -np.take_along_axis(logq_NV, targets_N.numpy()[:, None], 1)[:, 0]
    return kl_N, nll_N, logp_NV.argmax(1) == logq_NV.argmax(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("noise", [1e-4, 1e-2, 0.1, 1.0, 10.0])
def test_rows_are_those_of_the_definition(noise, dtype):
    p_NV, q_NV, targets_N = rows(1, noise=noise, dtype=dtype)
    compared = Reference.of(p_NV, targets_N).compare(q_NV, targets_N)
    nll_N = holds_the_definition(compared, p_NV, q_NV, targets_N)
    np.testing.assert_allclose(compared.nll_N, nll_N, rtol=0, atol=3e-6 * max(1, noise))


def holds_the_definition(compared, p_NV, q_NV, targets_N):
    """Hold divergence and agreement against the definition, and return its losses."""
    kl_N, nll_N, same_N = plain(p_NV, q_NV, targets_N)
    # A float32 logit near 10 has a spacing of 1e-6. The difference of two is rounded by half of
    # that where they are apart, and its square root of a KL: d(KL) = sqrt(2 KL) * 1e-6 at most,
    # beside the relative rounding of sums of 400 terms. What is trusted is right to `rounding`.
    atol = 1e-6 * np.sqrt(2 * kl_N) + 1e-12 + rounding(p_NV, q_NV) * (kl_N > TRUSTED)
    assert (abs(compared.kl_N.double().numpy() - kl_N) <= atol + 1e-5 * kl_N).all()
    assert compared.same_top_N.tolist() == same_N.tolist()
    return nll_N


@pytest.mark.parametrize("shift", [0.0, 20.0])
@pytest.mark.parametrize("noise", [0.003, 0.03, 0.3])
def test_sums_in_float32_are_right_to_their_rounding(noise, shift):
    p_NV, q_NV, targets_N = rows(4, count=16, vocabulary=32_000, noise=noise)
    p_NV[:, 0] += torch.linspace(0, 25, 16)  # from unsure to certain
    q_NV[:, 0] += torch.linspace(0, 25, 16)
    q_NV += shift
    kl_N, _, _ = plain(p_NV, q_NV, targets_N)
    measured_N = Reference.of(p_NV, targets_N).compare(q_NV, targets_N).kl_N.double().numpy()
    error_N = abs(measured_N - kl_N)
    assert (error_N <= rounding(p_NV, q_NV) + 1e-5 * kl_N).all()
    assert (error_N <= 0.006 * kl_N + 1e-12).all()  # 5e-7 of 1e-4, and input rounded to 1e-6


def on_gpu(p_NV, q_NV, targets_N):
    with pretended() as device:
        p_NV, q_NV, targets_N = (x.to("cuda") for x in (p_NV, q_NV, targets_N))
        compared = Reference.of(p_NV, targets_N).compare(q_NV, targets_N)
        assert not device.waits
        return replace(compared, kl_N=compared.kl_N.cpu(), same_top_N=compared.same_top_N.cpu())


def test_a_gpu_compares_without_a_wait_what_is_not_finite_too():
    for noise in (1e-4, 0.01, 1.0):
        p_NV, q_NV, targets_N = rows(5, count=40, noise=noise)
        holds_the_definition(on_gpu(p_NV, q_NV, targets_N), p_NV, q_NV, targets_N)
    inf, nan = torch.inf, torch.nan
    p_NV = torch.tensor([[0, 1, -inf], [0, 1, -inf], [500, 0, 0], [0, 1, 2], [0, nan, 1]])
    q_NV = torch.tensor([[0, 1, -50], [0, 1, -inf], [0, 500, 0], [0, -inf, 2], [0, 0, 0.0]])
    kl_N = on_gpu(p_NV, q_NV, torch.zeros(5, dtype=torch.long)).kl_N
    expected_N = torch.tensor([0, 0, 500, inf, nan])
    torch.testing.assert_close(kl_N, expected_N, equal_nan=True, atol=1e-6, rtol=1e-6)


def test_a_small_divergence_keeps_its_digits():
    p_NV, q_NV, targets_N = rows(2, vocabulary=100_000, noise=1e-4)
    exact_N = plain(p_NV, q_NV, targets_N)[0]
    kl_N = Reference.of(p_NV, targets_N).compare(q_NV, targets_N).kl_N.double().numpy()
    assert exact_N.max() < 1e-8
    np.testing.assert_allclose(kl_N, exact_N, rtol=0.02)  # logits are 1e-4 apart and 1e-6 exact


@given(st.integers(0, 10**6), st.sampled_from([1e-6, 1e-3, 0.3, 3.0, 40.0]), st.floats(0.01, 30))
def test_divergence_is_never_negative_and_that_of_equal_logits_is_zero(seed, noise, scale):
    p_NV, q_NV, targets_N = rows(seed, vocabulary=50, noise=noise)
    kl_N = Reference.of(p_NV, targets_N).compare(q_NV, targets_N).kl_N
    assert bool((kl_N >= 0).all())
    assert bool(torch.isfinite(kl_N).all())
    p_NV, _, targets_N = rows(seed, vocabulary=50, scale=scale)
    compared = Reference.of(p_NV, targets_N).compare(p_NV.clone(), targets_N)
    assert compared.kl_N.tolist() == [0.0] * len(p_NV)
    assert bool(compared.same_top_N.all())


@given(st.integers(0, 10**6), st.integers(-64, 64))
def test_adding_a_number_to_all_logits_changes_nothing(seed, shift):
    # Logits in steps of 2^-10, so that adding a whole number rounds nothing.
    p_NV, q_NV, targets_N = rows(seed, vocabulary=50)
    p_NV, q_NV = ((z_NV * 1024).round() / 1024 for z_NV in (p_NV, q_NV))
    reference = Reference.of(p_NV, targets_N)
    one, other = (reference.compare(z_NV, targets_N) for z_NV in (q_NV, q_NV + shift))
    assert bool((abs(one.kl_N - other.kl_N) <= 5e-7 * (2 + abs(shift)) + 1e-5 * one.kl_N).all())
    assert torch.equal(one.same_top_N, other.same_top_N)


def test_rows_that_rule_out_lie_far_apart_or_tie():
    p_NV = torch.tensor([[0.0, 1.0, -torch.inf]])
    q_NV = torch.tensor([[0.0, 1.0, -50.0]])
    compared = Reference.of(p_NV, torch.tensor([1])).compare(q_NV, torch.tensor([1]))
    assert compared.kl_N.tolist() == pytest.approx([0.0], abs=1e-7)
    ruled_out = Reference.of(q_NV + 60, torch.tensor([1])).compare(p_NV, torch.tensor([1]))
    assert ruled_out.kl_N.tolist() == [torch.inf]
    p_NV, q_NV = torch.tensor([[500.0, 0.0]]), torch.tensor([[0.0, 500.0]])
    target_N = torch.tensor([0])
    compared = Reference.of(p_NV, target_N).compare(q_NV, target_N)
    assert compared.kl_N.tolist() == compared.nll_N.tolist() == [500.0]
    assert divergence(p_NV, q_NV).tolist() == [500.0]
    reference = Reference.of(torch.tensor([[1.0, 2.0, 0.0]]), target_N)
    for q_V, agrees in (([2.0, 2.0, 0.0], True), ([2.0, 1.9, 0.0], False)):
        assert reference.compare(torch.tensor([q_V]), target_N).same_top_N.tolist() == [agrees]
    p_NV = torch.tensor([[1.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    assert Reference.of(p_NV, torch.tensor([0, 0])).top_N1.tolist() == [[1], [0]]


def in_parts(p_NV, q_NV, targets_N):
    """Return losses of full precision, and losses, divergences and agreement of a stream."""
    read = []
    for part in row_parts(p_NV):
        reference = Reference.of(p_NV[part], targets_N[part])
        rows_N = reference.compare(q_NV[part], targets_N[part])
        read.append((reference.nll_N, rows_N.nll_N, rows_N.kl_N, rows_N.same_top_N))
    return [torch.cat(column) for column in zip(*read, strict=True)]


@pytest.mark.parametrize("noise", [1e-3, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("elements", [1, 150, 1000, 10**9])
def test_a_row_does_not_depend_on_how_many_are_processed_at_once(elements, noise, monkeypatch):
    p_NV, q_NV, targets_N = rows(3, count=13, vocabulary=77, noise=noise)
    q_NV[::2] += 3 * (q_NV[::2] - p_NV[::2])  # rows of several forms side by side
    whole = in_parts(p_NV, q_NV, targets_N)
    monkeypatch.setattr("qaudit.core.fidelity.CORE_ELEMENTS", elements)
    for column, expected in zip(in_parts(p_NV, q_NV, targets_N), whole, strict=True):
        assert torch.equal(column, expected)
    for vocabulary in (256, 50_304, 262_144):  # a chunk of logits stays small
        assert 16 <= head_rows(vocabulary, "cpu") <= 256
        assert head_rows(vocabulary, "cpu") * vocabulary * 4 < 2**25
    assert torch.equal(losses(q_NV, targets_N), whole[1])


@pytest.mark.parametrize("seed", range(6))  # of four, one row's sum ends otherwise
def test_a_row_that_alone_is_far_is_the_one_that_it_is_beside_another(seed):
    p_NV, q_NV, targets_N = rows(seed, count=2, vocabulary=40_000, noise=0.3)
    p_NV[:, 0], q_NV[:, 0] = 22, 22  # nearly all of the probability
    reference, threads = Reference.of(p_NV, targets_N), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        both_N = reference.compare(q_NV, targets_N).kl_N
        q_NV[1] = p_NV[1]
        alone_N = reference.compare(q_NV, targets_N).kl_N
    finally:
        torch.set_num_threads(threads)
    assert 0 < both_N[0] < fidelity._TRUSTED
    assert (alone_N[0], alone_N[1]) == (both_N[0], 0)


# --------------------------------------------------------------------------------------------------
# A sampler draws from what transformers' own processors leave of the logits.


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1, None, 1), (0.7, 5, 1), (1.3, None, 0.6), (0.6, 20, 0.95), (1, 1, 1), (1, None, 1e-6)],
)
def test_what_is_left_is_what_transformers_leaves(temperature, top_k, top_p):
    logits = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)) * 3
    processors = [TemperatureLogitsWarper(float(temperature))] if temperature != 1 else []
    processors += [TopKLogitsWarper(top_k)] if top_k else []
    processors += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    expected = logits.clone()
    for processor in processors:
        expected = processor(None, expected)
    found = log_probabilities(logits, temperature, top_k, top_p)
    assert torch.allclose(found.exp(), expected.softmax(-1), atol=1e-6)
    assert torch.equal(found.isinf(), expected.isinf())


def test_flat_and_peaked_rows_are_cut_alike_in_large_vocabularies():
    random = torch.Generator().manual_seed(2)
    scale = torch.tensor([0.1, 1.0, 4.0, 9.0])[:, None]  # of the first, 0.9 takes most tokens
    logits = torch.randn(4, 40_000, generator=random) * scale
    expected = TopPLogitsWarper(0.9)(None, logits)
    found = log_probabilities(logits, top_p=0.9)
    kept = found.isfinite().sum(-1)
    assert (kept - expected.isfinite().sum(-1)).abs().max() <= 2  # sums are rounded
    assert kept[0] > 1024 > kept[3]


def test_tokens_are_drawn_as_often_as_they_are_likely():
    probability = torch.tensor([0.0, 0.5, 0.0, 0.125, 0.375])
    uniform = (torch.arange(800) / 800).double()
    drawn = draw(probability.log().expand(800, -1), uniform)
    assert torch.bincount(drawn, minlength=5).tolist() == [0, 400, 0, 100, 300]
    last = draw(probability.log()[None], torch.tensor([1 - 2**-53], dtype=torch.float64))
    assert last.tolist() == [4]


def test_a_token_that_was_drawn_was_kept():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    for token, wrote, expected in (
        (2, False, -torch.inf),
        (2, True, torch.tensor([3.0, 2.0, 1.0]).log_softmax(0)[2]),
        *((1, wrote, torch.tensor([3.0, 2.0]).log_softmax(0)[1]) for wrote in (False, True)),
    ):
        given = logits, torch.tensor([token]), torch.tensor([0]), (1.0, 2, 1.0)
        found, _ = drawn_log_probability(*given, wrote=wrote)
        assert found.tolist() == pytest.approx([float(expected)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampler",
    [(0.8, None, 1.0), (0.8, 50, 1.0), (1.0, None, 0.9), (0.6, 20, 0.95), (1.0, 5000, 0.99)],
)
def test_what_was_drawn_has_the_probability_that_it_is_drawn_with(sampler, dtype):
    """Rows that keep one token, hundreds and thousands, with ties in bfloat16."""
    random = torch.Generator().manual_seed(4)
    scale = torch.tensor([0.1, 1.0, 3.0, 9.0]).repeat(5)[:, None]
    logits = (torch.randn(20, 20_011, generator=random) * scale).to(dtype)
    likely = logits.float().topk(100).indices
    targets = likely.gather(1, torch.randint(0, 100, (20, 1), generator=random)).squeeze(1)
    rows = torch.tensor([0, 3, 5, 6, 7, 9, 14, 18, 19])
    found, none = drawn_log_probability(logits, targets, rows, sampler, wrote=False)
    assert none is None
    temperature, top_k, top_p = sampler
    scaled = logits[rows].double() / temperature
    if top_k is not None:
        scaled[scaled < scaled.topk(top_k).values[:, -1:]] = -torch.inf
    ordered = scaled.sort(descending=True, stable=True)
    of_top_k = ordered.values[:, :top_k].softmax(-1)
    last = (of_top_k.cumsum(-1) - of_top_k < top_p).sum(-1, keepdim=True) - 1
    scaled[scaled < ordered.values.gather(1, last)] = -torch.inf
    expected = scaled.log_softmax(-1).gather(1, targets[rows, None]).squeeze(1)
    assert torch.equal(found.isneginf(), expected.isneginf())
    assert expected.isfinite().any()
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sampler", [(1.0, None, 1.0), (0.7, 20, 1.0), (1.3, None, 0.99)])
def test_entropy_is_that_of_the_distribution_that_is_drawn_from(sampler):
    logits = 4 * torch.randn(30, 700, generator=torch.Generator().manual_seed(2))
    logits[:, 5] = -torch.inf
    rows = torch.tensor([3, 4, 9, 29])
    kept = log_probabilities(logits.double()[rows], *sampler).exp()
    wanted = torch.distributions.Categorical(probs=kept).entropy()
    _, found = drawn_log_probability(logits, torch.zeros(30).long(), rows, sampler, wrote=True)
    assert found is not None
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
