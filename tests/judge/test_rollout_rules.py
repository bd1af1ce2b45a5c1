"""Rules about rollouts: greedy answers that change early, and answers that end otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qaudit.judge.tasks import answer_length, tokens_to_divergence
from qaudit.policy.keys import margin_of
from qaudit.report.gate.checks import margin, shown
from qaudit.types import Check, RolloutEvidence
from tests.support.gated import SCHEMES, A, check, held, judged, measured, of, policy, rule

GPTQ = SCHEMES[0]
PROMPTS, TOKENS = 40, 200


def evidence(agreed: Any, end: float = 1.0, **changes: Any) -> RolloutEvidence:
    draw = np.random.default_rng(7)
    values = {
        "sha256": "hash",
        "prompt": np.arange(PROMPTS),
        "tokens": np.full(PROMPTS, TOKENS),
        "nll_sum": np.full(PROMPTS, 100.0),
        "agreed": np.broadcast_to(agreed, PROMPTS).astype(np.int64),
        "end_names": ("turn",),
        "end_sum": end * draw.gamma(9, 0.1, (PROMPTS, 1)),
        "kl_sum": np.full(PROMPTS, 0.1),
    }
    return RolloutEvidence(**{**values, **changes})


FULL = evidence(TOKENS, kl_sum=None)


def asked(
    stream: RolloutEvidence, metric: str, bound: float, full: RolloutEvidence = FULL
) -> Check:
    """Judge a stream that makes this of rollouts."""
    cells = [
        replace(m, evidence=replace(m.evidence, rollouts=full if m.scheme == "fp" else stream))
        for m in measured({(A, GPTQ): 0.01}, levels={A: 3.0})
    ]
    rules = policy(rule(subjects=(A,), schemes=(GPTQ,), metric=metric, margin=bound))
    return check(judged(rules, of(cells)), A)


SPREAD = np.linspace(40, 80, PROMPTS)


def test_answers_that_change_before_the_margin_breach() -> None:
    for bound, outcome in ((30, "pass"), (60, "inconclusive"), (90, "fail")):
        found = asked(evidence(SPREAD), "tokens_to_divergence", bound)
        assert (found.outcome, found.documents) == (outcome, PROMPTS)
        assert f"the margin is {bound} tokens" in found.message
        assert margin(found) == f"at least {bound} tokens"
        assert found.interval is not None and "tokens [" in shown(found.unit, found.interval)


def test_a_change_of_length_has_no_sign() -> None:
    draw = np.random.default_rng(1)
    other = evidence(SPREAD, end_sum=FULL.end_sum * draw.normal(1.0, 0.5, (PROMPTS, 1)))
    found = answer_length(other, FULL, 0.95)
    assert found is not None
    assert found.low == 0.0 <= found.estimate <= found.high
    assert answer_length(replace(other, sha256="other"), FULL, 0.95) is None
    assert answer_length(replace(other, end_names=("reasoning",)), FULL, 0.95) is None


COLUMNS = ("prompt", "tokens", "nll_sum", "agreed", "end_sum", "kl_sum")


def test_a_prompt_counts_once_and_margins_of_tokens_have_their_unit() -> None:
    twice = evidence(SPREAD, prompt=np.arange(PROMPTS) // 2)
    first = {k: v[::2] if k in COLUMNS else v for k, v in vars(twice).items()}
    assert tokens_to_divergence(twice, 0.95) is not None
    assert tokens_to_divergence(twice, 0.95) == tokens_to_divergence(RolloutEvidence(**first), 0.95)
    assert margin_of("100 tokens", "tokens_to_divergence") == 100
    tokens = "a number of tokens"
    for text, wrong in (("5%", tokens), ("2 nats", tokens), ("9", "has no unit")):
        with pytest.raises(ValueError, match=wrong):
            margin_of(text, "tokens_to_divergence")
    with pytest.raises(ValueError, match="is no margin of `kl`"):
        margin_of("5 tokens", "kl")


def marked(shift: float, **changes: Any) -> RolloutEvidence:
    """Return 20 drawn answers of each prompt with marks, right ones `shift` more likely."""
    draw = np.random.default_rng(3)
    count = PROMPTS * 20
    mark = (draw.random(count) < 0.6).astype(np.float64)
    subject = next(s for s in held().table.subjects if s.label == A)
    values = {
        "sha256": "hash",
        "prompt": np.arange(count) % PROMPTS,
        "tokens": np.full(count, TOKENS),
        "nll_sum": np.full(count, 100.0),
        "agreed": np.full(count, -1),
        "end_names": (),
        "end_sum": np.zeros((count, 0)),
        "mark": mark,
        "drawn_sum": shift * (mark - 0.6) + draw.normal(0, 0.01, count),
        "weights_sha256": subject.content,
    }
    return RolloutEvidence(**{**values, **changes})


def asked_score(
    stream: RolloutEvidence, bound: float, full: RolloutEvidence | None = None
) -> Check:
    full = full or marked(0.0, drawn_sum=np.zeros(PROMPTS * 20))
    return asked(stream, "expected_score_drop", bound, full)


def test_expected_scores_that_drop_breach_and_what_is_not_weighed_is_missing() -> None:
    for shift, outcome in ((0.0, "pass"), (0.3, "pass"), (-0.5, "fail")):
        found: Any = asked_score(marked(shift), 0.05)
        assert found.outcome == outcome
        assert (found.interval.estimate > 0.05) == (outcome == "fail")
    other = asked_score(marked(0.0, weights_sha256="other"), 0.05)
    assert other.outcome == "missing"
    assert "they are answers of other weights" in other.message
    far = np.where(np.arange(PROMPTS * 20) == 3, 0.0, -30.0)
    assert asked_score(marked(0.0, drawn_sum=far), 0.05).outcome == "missing"


def drawn_at(temperature: float) -> dict[str, Any]:
    """Return what full precision has of answers of 30 tokens that were drawn at a temperature."""
    draw = np.random.default_rng(5)
    logits = draw.normal(0, 2, 50)
    log_p = logits - np.log(np.exp(logits).sum())
    drawn = np.exp(logits / temperature)
    tokens = draw.choice(50, size=(PROMPTS * 20, 30), p=drawn / drawn.sum())
    entropy = -30 * (np.exp(log_p) * log_p).sum()
    return {
        "drawn_sum": log_p[tokens].sum(1), "entropy_sum": np.full(PROMPTS * 20, entropy)
    }  # fmt: skip


def test_answers_drawn_otherwise_are_not_weighed() -> None:
    for temperature, how in ((0.9, "less"), (1.0, None), (1.1, "more")):
        full = drawn_at(temperature)
        found = asked_score(marked(0.0, drawn_sum=full["drawn_sum"]), 0.05, marked(0.0, **full))
        assert found.outcome == ("missing" if how else "pass")
        assert how is None or f"% {how} by these answers" in found.message
        assert how is None or "other weights wrote them, or another sampler" in found.message
