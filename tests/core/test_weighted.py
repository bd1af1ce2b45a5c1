"""Expected scores under weights cover what generation would give, or are not said."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from qaudit.core.items import ExpectedScore, effective_size, expected_score

Array = npt.NDArray[np.float64]

TOKENS, LENGTH, PROMPTS, SAMPLES = 4, 10, 64, 12


def chains(rng: np.random.Generator, prompts: int, damage: float) -> tuple[Array, Array]:
    """Return next-token probabilities of p and q: a Markov chain of its own for each prompt."""
    logits = rng.normal(size=(prompts, TOKENS, TOKENS)) * 1.5
    noise = rng.standard_t(3, size=logits.shape) * damage
    both = [np.exp(values) for values in (logits, logits + noise)]
    return both[0] / both[0].sum(-1, keepdims=True), both[1] / both[1].sum(-1, keepdims=True)


def brute_force(chain: Array) -> float:
    """Return the exact share of answers that end in the last token, over all prompts."""
    state = np.zeros((len(chain), TOKENS))
    state[:, 0] = 1
    for _ in range(LENGTH):
        state = np.einsum("gi,gij->gj", state, chain)
    return float(state[:, -1].mean())


def weighed(rng: np.random.Generator, p: Array, q: Array) -> ExpectedScore:
    """Draw answers from p, mark them, and weigh them by q."""
    prompts = np.arange(len(p))[:, None]
    state = np.zeros((len(p), SAMPLES), dtype=np.int64)
    log_weight = np.zeros(state.shape)
    for _ in range(LENGTH):
        cumulative = p[prompts, state].cumsum(-1)
        after = (cumulative < rng.random((*state.shape, 1))).sum(-1).clip(max=TOKENS - 1)
        log_weight += np.log(q[prompts, state, after] / p[prompts, state, after])
        state = after
    mark = (state == TOKENS - 1).astype(np.float64)
    groups = np.repeat(np.arange(len(p)), SAMPLES)
    return expected_score(mark.ravel(), log_weight.ravel(), groups)


@pytest.mark.parametrize("damage", [0.02, 0.15, 0.3])
def test_at_least_93_percent_of_intervals_hold_what_generation_gives(damage: float) -> None:
    rng = np.random.default_rng(7)
    every = chains(rng, 20_000, damage)
    before, truth = map(brute_force, every)
    results = [weighed(rng, *chains(rng, PROMPTS, damage)) for _ in range(300)]
    said = [(r.score, r.change) for r in results if r.score is not None and r.change is not None]
    assert len(said) > 150
    scores = [score.low <= truth <= score.high for score, _ in said]
    changes = [change.low <= truth - before <= change.high for _, change in said]
    assert np.mean(scores) >= 0.93
    assert np.mean(changes) >= 0.93


def test_nothing_is_said_of_answers_that_a_scheme_would_not_write() -> None:
    rng = np.random.default_rng(3)
    for damage in (1.5, 3.0):
        results = [weighed(rng, *chains(rng, PROMPTS, damage)) for _ in range(20)]
        assert all(r.score is None and r.change is None for r in results)
        assert all("generate" in r.reason for r in results)


def test_equal_weights_are_the_plain_mean_and_no_change() -> None:
    rng = np.random.default_rng(0)
    score = (rng.random(400) < 0.3).astype(np.float64)
    result = expected_score(score, np.zeros(400), np.repeat(np.arange(100), 4))
    assert result.score is not None
    assert result.change is not None
    assert result.score.estimate == pytest.approx(score.mean())
    assert (result.change.estimate, result.change.high) == pytest.approx((0, 0))
    assert result.effective == pytest.approx(400)


def test_too_few_samples_prompts_and_marks_are_refused() -> None:
    few = expected_score(np.ones(80), np.zeros(80), np.arange(80))
    assert few.reason == "the effective sample size is 80 of 80, below 100: generate"
    alone = expected_score(np.ones(200), np.zeros(200), np.repeat(np.arange(5), 40))
    assert alone.reason == "5 prompts are fewer than 10"
    none = expected_score(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64))
    assert none.reason == "no sampled rollout has a mark"
    nan = expected_score(np.ones(200), np.full(200, np.nan), np.arange(200))
    assert nan.reason == "probabilities are not finite"
    for result in (few, alone, none, nan):
        assert result.score is None


def test_tokens_that_only_the_scheme_takes_are_seen_in_the_mean_of_the_weights() -> None:
    rng = np.random.default_rng(2)
    # A top-p that cut a token off which the scheme would take a third of the time.
    weights = np.log(rng.uniform(0.5, 0.8, 1000))
    result = expected_score(rng.random(1000), weights, np.repeat(np.arange(100), 10))
    assert result.score is None
    assert "weights average 0.65" in result.reason
    assert effective_size(weights) > 900


def test_an_answer_that_the_scheme_cannot_write_has_no_weight() -> None:
    weights = np.zeros(400)
    weights[:4] = -np.inf
    result = expected_score(np.arange(400.0) % 2, weights, np.repeat(np.arange(100), 4))
    assert result.effective == pytest.approx(396)
    assert result.score is not None
