"""A sampler draws from what transformers' own processors leave of the logits."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from qaudit.core.fidelity import draw, drawn_log_probability, log_probabilities


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1, None, 1),
        (0.7, 5, 1),
        (1.3, None, 0.6),
        (0.6, 20, 0.95),
        (1, 1, 1),
        (1, None, 1e-6),
    ],
)
def test_what_is_left_is_what_transformers_leaves(
    temperature: float, top_k: int | None, top_p: float
) -> None:
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


def test_flat_and_peaked_rows_are_cut_alike_in_large_vocabularies() -> None:
    random = torch.Generator().manual_seed(2)
    scale = torch.tensor([0.1, 1.0, 4.0, 9.0])[:, None]  # of the first, 0.9 takes most tokens
    logits = torch.randn(4, 40_000, generator=random) * scale
    expected = TopPLogitsWarper(0.9)(None, logits)
    found = log_probabilities(logits, top_p=0.9)
    kept = found.isfinite().sum(-1)
    assert (kept - expected.isfinite().sum(-1)).abs().max() <= 2  # sums are rounded
    assert kept[0] > 1024 > kept[3]


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    probability = torch.tensor([0.0, 0.5, 0.0, 0.125, 0.375])
    uniform = (torch.arange(800) / 800).double()
    drawn = draw(probability.log().expand(800, -1), uniform)
    assert torch.bincount(drawn, minlength=5).tolist() == [0, 400, 0, 100, 300]
    last = draw(probability.log()[None], torch.tensor([1 - 2**-53], dtype=torch.float64))
    assert last.tolist() == [4]


def test_a_token_that_was_drawn_was_kept() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    sampler, row = (1.0, 2, 1.0), torch.tensor([0])
    third = torch.tensor([2])
    assert drawn_log_probability(logits, third, row, sampler, wrote=False)[0].isneginf().all()
    drawn, _ = drawn_log_probability(logits, third, row, sampler, wrote=True)
    kept = torch.tensor([3.0, 2.0, 1.0]).log_softmax(0)[2]
    assert torch.allclose(drawn, kept[None])
    second = torch.tensor([1])
    for wrote in (False, True):
        found, _ = drawn_log_probability(logits, second, row, sampler, wrote=wrote)
        assert torch.allclose(found, torch.tensor([3.0, 2.0]).log_softmax(0)[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampler",
    [(0.8, None, 1.0), (0.8, 50, 1.0), (1.0, None, 0.9), (0.6, 20, 0.95), (1.0, 5000, 0.99)],
)
def test_what_was_drawn_has_the_probability_that_it_is_drawn_with(
    sampler: tuple[float, int | None, float], dtype: torch.dtype
) -> None:
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
def test_entropy_is_that_of_the_distribution_that_is_drawn_from(
    sampler: tuple[float, int | None, float],
) -> None:
    logits = 4 * torch.randn(30, 700, generator=torch.Generator().manual_seed(2))
    logits[:, 5] = -torch.inf
    rows = torch.tensor([3, 4, 9, 29])
    kept = log_probabilities(logits.double()[rows], *sampler).exp()
    wanted = torch.distributions.Categorical(probs=kept).entropy()
    _, found = drawn_log_probability(logits, torch.zeros(30).long(), rows, sampler, wrote=True)
    assert found is not None
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
