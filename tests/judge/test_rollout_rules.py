"""Rules about rollouts: greedy answers that change early, and answers that end otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qaudit.judge.gate import GateInput
from qaudit.judge.rollouts import answer_length, tokens_to_divergence
from qaudit.policy.keys import margin_of
from qaudit.report.gate.standing import margin, value
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


def audit(stream: RolloutEvidence) -> GateInput:
    """Return an audit in which one stream makes this of rollouts."""
    cells = measured({(A, GPTQ): 0.01}, levels={A: 3.0})
    return of(
        [
            replace(m, evidence=replace(m.evidence, rollouts=FULL if m.scheme == "fp" else stream))
            for m in cells
        ]
    )


def asked(stream: RolloutEvidence, metric: str, bound: float) -> Check:
    rules = policy(rule(subjects=(A,), schemes=(GPTQ,), metric=metric, margin=bound))
    return check(judged(rules, audit(stream)), A)


SPREAD = np.linspace(40, 80, PROMPTS)


@pytest.mark.parametrize(
    ("bound", "outcome"), [(30, "pass"), (60, "inconclusive"), (90, "fail"), (200, "fail")]
)
def test_answers_that_change_before_the_margin_breach(bound: float, outcome: str) -> None:
    found = asked(evidence(SPREAD), "tokens_to_divergence", bound)
    assert found.outcome == outcome
    assert found.documents == PROMPTS
    assert f"the margin is {bound} tokens" in found.message
    assert margin(found) == f"at least {bound} tokens"
    assert "tokens [" in value(found)


def test_answers_that_never_change_pass() -> None:
    found = asked(evidence(TOKENS), "tokens_to_divergence", 100)
    assert found.outcome == "pass"
    assert "change within more than is written [inf, inf]" in found.message


def test_sampled_rollouts_do_not_answer_where_answers_change() -> None:
    found = asked(evidence(-1), "tokens_to_divergence", 100)
    assert found.outcome == "missing"
    assert "have no greedy rollouts" in found.message


@pytest.mark.parametrize(
    ("end", "outcome"), [(1.02, "pass"), (0.98, "pass"), (1.2, "fail"), (0.8, "fail")]
)
def test_answers_that_end_otherwise_breach_both_ways(end: float, outcome: str) -> None:
    assert asked(evidence(SPREAD, end), "answer_length", 0.1).outcome == outcome


def test_a_change_of_length_has_no_sign() -> None:
    draw = np.random.default_rng(1)
    other = evidence(SPREAD, end_sum=FULL.end_sum * draw.normal(1.0, 0.5, (PROMPTS, 1)))
    found = answer_length(other, FULL, 0.95)
    assert found is not None
    assert found.low == 0.0 <= found.estimate <= found.high
    assert answer_length(replace(other, sha256="other"), FULL, 0.95) is None
    assert answer_length(replace(other, end_names=("reasoning",)), FULL, 0.95) is None


def test_a_prompt_counts_once() -> None:
    twice = evidence(SPREAD, prompt=np.arange(PROMPTS) // 2)
    once = tokens_to_divergence(twice, FULL, 0.95)
    assert once is not None
    assert once == tokens_to_divergence(
        RolloutEvidence(**{k: v[::2] if k in COLUMNS else v for k, v in vars(twice).items()}),
        FULL,
        0.95,
    )


COLUMNS = ("prompt", "tokens", "nll_sum", "agreed", "end_sum", "kl_sum")


def test_audits_without_rollouts_are_asked_for_them() -> None:
    rules = policy(
        rule(subjects=(A,), schemes=(GPTQ,), metric="tokens_to_divergence", margin=100.0)
    )
    found = check(judged(rules, held()), A)
    assert found.outcome == "missing"
    assert "no rollouts were scored" in found.message
    assert "--rollouts" in found.hint


def test_few_prompts_are_inconclusive() -> None:
    few = evidence(150)
    few = RolloutEvidence(**{k: v[:5] if k in COLUMNS else v for k, v in vars(few).items()})
    found = asked(few, "tokens_to_divergence", 20)
    assert found.outcome == "inconclusive"
    assert "prompts" in found.hint


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("5%", "a number of tokens"), ("2 nats", "a number of tokens"), ("9", "has no unit")],
)
def test_margins_of_tokens_have_their_unit(text: str, wrong: str) -> None:
    assert margin_of("100 tokens", "tokens_to_divergence") == 100
    with pytest.raises(ValueError, match=wrong):
        margin_of(text, "tokens_to_divergence")
    with pytest.raises(ValueError, match="is no margin of `kl`"):
        margin_of("5 tokens", "kl")
