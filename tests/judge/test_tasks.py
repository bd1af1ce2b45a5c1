"""Answers of options and rollouts, their pairs, and what a policy makes of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.judge.diff import task_deltas
from qaudit.judge.tasks import answer_length, answers, margin_ratios, tokens_to_divergence
from qaudit.policy.keys import margin_of
from qaudit.report.gate.checks import margin, shown
from qaudit.types import RolloutEvidence, TaskEvidence
from tests.support.gated import SCHEMES, A, check, held, judged, measured, of, policy, rule
from tests.support.items import items_of


def test_the_likeliest_option_is_the_answer_and_of_equal_ones_the_first():
    one = items_of(np.array([2.0, 1.0, 1.0, 3.0, 5.0, 4.0]), options=3, answer=1)
    found = answers(one)
    assert found.picked_N.tolist() == [1, 0]
    assert found.right_N.tolist() == [True, False]
    broken = answers(items_of(np.array([np.nan, 1.0, np.inf, np.inf, 2.0, 1.0]), options=2))
    assert broken.picked_N.tolist() == [-1, -1, 1]


def test_two_audits_are_paired_on_the_items_that_both_answered():
    a = items_of(np.tile([1.0, 2.0], 200), options=2, task="t")
    nll = np.tile([1.0, 2.0], (200, 1))
    nll[:40] = [2.0, 1.0]
    b = items_of(nll.ravel(), options=2, task="t")
    fewer = items_of(np.tile([1.0, 2.0], 100), options=2, task="t")
    cell = ("s", "gptq-4bit")
    worse, same, apart = task_deltas([(cell, a, b), (cell, a, a), (cell, b, fewer)], 0.95)
    assert (worse.reading, worse.paired, worse.drop.estimate) == ("worse", True, 0.2)
    assert (same.reading, same.drop.estimate) == ("same", 0.0)
    assert (apart.paired, apart.reading) == (False, "better")
    assert worse.drop.high - worse.drop.low < apart.drop.high - apart.drop.low


LOSSES = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.5, np.inf, -np.inf, np.nan])


@st.composite
def task_pairs(draw):
    """Draw the same items under full precision and under a scheme; some items have no option."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=6))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    losses = st.lists(LOSSES, min_size=len(owner), max_size=len(owner))
    marks = st.lists(st.booleans(), min_size=len(owner), max_size=len(owner))
    right, greedy = (np.array(draw(marks), dtype=np.bool_) for _ in range(2))
    first, second = (
        TaskEvidence("t", np.array(draw(losses)), owner, right, greedy) for _ in range(2)
    )
    return first, second


@given(task_pairs())
def test_answers_are_those_of_a_loop_over_items(pair):
    full, other = pair
    count = int(full.items.max(initial=-1)) + 1
    options = [np.flatnonzero(full.items == item) for item in range(count)]
    marked = answers(full)
    ratios = []
    for item, places in enumerate(options):
        before, after = full.nll[places], other.nll[places]
        picked, right = -1, False
        if len(places) == 1:
            picked, right = 0, bool(full.greedy[places[0]])
        elif not np.isnan(before).any() and np.isfinite(before).any():
            picked = int(np.argmin(before))
            right = bool(full.right[places[picked]])
        assert (marked.picked_N[item], marked.right_N[item]) == (picked, right)
        if len(places) > 1 and np.isfinite(before).all() and np.isfinite(after).all():
            margin = np.delete(before, picked).min() - before[picked]
            if margin > 0:
                ratios.append((np.delete(after, picked).min() - after[picked]) / margin)
    assert margin_ratios(other, full).tolist() == ratios


GPTQ = SCHEMES[0]
PROMPTS, TOKENS = 40, 200


def evidence(agreed, end=1.0, **changes):
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


def asked(stream, metric, bound, full=FULL):
    """Judge a stream that makes this of rollouts."""
    cells = [
        replace(m, evidence=replace(m.evidence, rollouts=full if m.scheme == "fp" else stream))
        for m in measured({(A, GPTQ): 0.01}, levels={A: 3.0})
    ]
    rules = policy(rule(subjects=(A,), schemes=(GPTQ,), metric=metric, margin=bound))
    return check(judged(rules, of(cells)), A)


SPREAD = np.linspace(40, 80, PROMPTS)


def test_answers_that_change_before_the_margin_breach():
    for bound, outcome in ((30, "pass"), (60, "inconclusive"), (90, "fail")):
        found = asked(evidence(SPREAD), "tokens_to_divergence", bound)
        assert (found.outcome, found.documents) == (outcome, PROMPTS)
        assert f"the margin is {bound} tokens" in found.message
        assert margin(found) == f"at least {bound} tokens"
        assert found.interval is not None and "tokens [" in shown(found.unit, found.interval)


def test_a_change_of_length_has_no_sign():
    draw = np.random.default_rng(1)
    other = evidence(SPREAD, end_sum=FULL.end_sum * draw.normal(1.0, 0.5, (PROMPTS, 1)))
    found = answer_length(other, FULL, 0.95)
    assert found.low == 0.0 <= found.estimate <= found.high
    assert answer_length(replace(other, sha256="other"), FULL, 0.95) is None
    assert answer_length(replace(other, end_names=("reasoning",)), FULL, 0.95) is None


COLUMNS = ("prompt", "tokens", "nll_sum", "agreed", "end_sum", "kl_sum")


def test_a_prompt_counts_once_and_margins_of_tokens_have_their_unit():
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


def marked(shift, **changes):
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


def asked_score(stream, bound, full=None):
    full = full or marked(0.0, drawn_sum=np.zeros(PROMPTS * 20))
    return asked(stream, "expected_score_drop", bound, full)


def test_expected_scores_that_drop_breach_and_what_is_not_weighed_is_missing():
    for shift, outcome in ((0.0, "pass"), (0.3, "pass"), (-0.5, "fail")):
        found = asked_score(marked(shift), 0.05)
        assert found.outcome == outcome
        assert (found.interval.estimate > 0.05) == (outcome == "fail")
    other = asked_score(marked(0.0, weights_sha256="other"), 0.05)
    assert other.outcome == "missing"
    assert "they are answers of other weights" in other.message
    far = np.where(np.arange(PROMPTS * 20) == 3, 0.0, -30.0)
    assert asked_score(marked(0.0, drawn_sum=far), 0.05).outcome == "missing"


def drawn_at(temperature):
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


def test_answers_drawn_otherwise_are_not_weighed():
    for temperature, how in ((0.9, "less"), (1.0, None), (1.1, "more")):
        full = drawn_at(temperature)
        found = asked_score(marked(0.0, drawn_sum=full["drawn_sum"]), 0.05, marked(0.0, **full))
        assert found.outcome == ("missing" if how else "pass")
        assert how is None or f"% {how} by these answers" in found.message
        assert how is None or "other weights wrote them, or another sampler" in found.message
