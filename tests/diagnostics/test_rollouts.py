"""Rows of rollouts and of routing: sums by prompt, greedy divergence, what ends, which experts."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from qaudit.core import statistics
from qaudit.diagnostics.rollouts import _tokens, judge
from qaudit.diagnostics.routing import judge as judge_routing
from qaudit.judge.gate import gate
from qaudit.judge.table import Measurements
from qaudit.saved.audits import from_json, to_json
from qaudit.types import Diagnostics, Interval, Positions, Roles, RolloutEvidence, Routing
from tests.support import sample
from tests.support.cards import section, whole
from tests.support.filled import filled
from tests.support.gated import TODAY, A, held, of, policy, rule
from tests.support.saved_audits import violations

CELL = ("soup", "gptq-3bit")


def evidence(**changes):
    """Return 12 prompts with a greedy and a sampled rollout each."""
    random = np.random.default_rng(4)
    tokens = random.integers(20, 40, 24)
    values = {
        "sha256": "hash", "prompt": np.repeat(np.arange(12), 2), "tokens": tokens,
        "nll_sum": tokens * 1.5, "end_names": ("turn",),
        "agreed": np.where(np.arange(24) % 2, -1, random.integers(0, 20, 24)),
        "end_sum": random.gamma(9, 0.1, (24, 1)), "kl_sum": random.gamma(5, 0.1, 24),
    }  # fmt: skip
    return RolloutEvidence(**{**values, **changes})


def table(quantized, full):
    measured = [
        replace(m, evidence=replace(m.evidence, rollouts=full if m.scheme == "fp" else quantized))
        for m in sample.measurements(12)
    ]
    return Measurements.of(sample.series(), measured, 0.95)


def row(quantized, full=None):
    full = full or evidence(kl_sum=None)
    rows = judge(table(quantized, full), Diagnostics())[0].rollouts
    (found,) = (r for r in rows if (r.subject, r.scheme) == CELL)
    return found


def test_sums_are_over_prompts_and_greedy_divergence_counts_from_one():
    one = evidence()
    found = row(one)
    assert one.kl_sum is not None
    assert (found.prompts, found.samples, found.tokens) == (12, 24, int(one.tokens.sum()))
    kl, tokens = one.kl_sum.reshape(12, 2).sum(1), one.tokens.reshape(12, 2).sum(1)
    drawn = one.kl_sum[1::2], np.ones(12)  # without greedy ones
    assert found.sequence_kl == statistics.interval(drawn, statistics.per_token, 0.95)
    alone = row(evidence(agreed=np.zeros(24, dtype=int))).sequence_kl
    assert alone == statistics.interval((kl, np.full(12, 2.0)), statistics.per_token, 0.95)
    assert found.kl == statistics.interval((kl, tokens * 1.0), statistics.per_token, 0.95)
    assert found.ce.estimate == pytest.approx(1.5)
    plain = row(evidence())
    assert plain.tokens_to_divergence == statistics.median(1.0 + evidence().agreed[::2])
    assert plain.never_diverges == statistics.accuracy(np.zeros(12))
    for high, text in ((9.0, "5 [3, 9]"), (np.inf, "5 [3, never]")):
        assert _tokens(replace(plain, tokens_to_divergence=Interval(5.0, 3.0, high))) == text
    agreed = np.where(np.arange(24) % 2, -1, evidence().tokens)
    agreed[:8:2] = 3
    beyond = row(evidence(agreed=agreed))
    assert beyond.tokens_to_divergence is None
    assert beyond.never_diverges is not None
    assert beyond.never_diverges.estimate == pytest.approx(8 / 12)
    sampled = row(evidence(agreed=np.full(24, -1)))
    assert (sampled.tokens_to_divergence, sampled.never_diverges) == (None, None)
    assert sampled.sequence_kl is not None
    full = evidence(kl_sum=None)
    found = row(evidence(end_sum=full.end_sum * 1.25), full)
    assert found.end_of_turn is not None
    assert found.end_of_turn.estimate == pytest.approx(0.25)
    assert found.end_of_turn.low == pytest.approx(0.25, abs=1e-9)
    assert found.end_of_reasoning is None
    assert row(evidence(), replace(full, sha256="other")).end_of_turn is None


def parts(factors):
    """Return rollouts whose ends are so much likelier in each of two roles and two bins."""
    tokens = np.stack([evidence().tokens - 5, np.where(np.arange(24) % 4 < 2, 5, 0)], 1)
    ends = np.random.default_rng(1).gamma(9, 0.1, (24, 2, 1)) * np.array(factors)[:, None]
    sums = {"tokens": tokens, "nll_sum": tokens * 1.5, "kl_sum": tokens * 0.1, "end_sum": ends}
    positions = Positions(np.array([0, 16, 40]), **sums)
    return evidence(roles=Roles(("reasoning", "answer"), **sums), positions=positions)


def test_ends_are_told_by_role_and_by_place_in_the_answer_and_on_the_card():
    quantized, full = parts((1.5, 0.9)), parts((1.0, 1.0))
    rows = judge(table(quantized, full), Diagnostics())[0]
    found = [r for r in rows.rollout_roles if (r.subject, r.scheme) == CELL]
    places = [r for r in rows.rollout_positions if (r.subject, r.scheme) == CELL]
    assert [(r.role, r.documents) for r in found] == [("reasoning", 12), ("answer", 6)]
    assert [(r.first, r.last, r.documents) for r in places] == [(0, 15, 12), (16, 39, 6)]
    for reasoning, answer in (found, places):
        assert reasoning.end_of_turn is not None
        assert answer.end_of_turn is not None
        assert reasoning.end_of_turn.estimate == pytest.approx(0.5)
        assert answer.end_of_turn.estimate == pytest.approx(-0.1)
        assert reasoning.end_of_reasoning is None
        assert reasoning.kl is not None
        assert reasoning.kl.estimate == pytest.approx(0.1)
    of_full = [r for r in rows.rollout_roles if r.scheme == "fp"]
    assert of_full
    assert all(row.end_of_turn is None for row in of_full)
    audit = replace(sample.audit(), diagnostics=rows)
    assert violations(json.loads(to_json(audit))) == []
    assert from_json(to_json(audit)).diagnostics.rollout_roles == rows.rollout_roles
    pick = audit.pick
    assert pick is not None
    text = section(whole(audit), "Rollouts")
    assert f"{pick.subject} at {pick.scheme}, by role and by place in the answer" in text
    assert "| reasoning | " in text
    assert "| tokens 16 to 39 | " in text
    rare = judge(table(parts((1e-3, 1)), parts((1e-4, 1))), Diagnostics())[0].rollout_roles
    reasoning, answer = (r for r in rare if (r.subject, r.scheme) == CELL)
    assert reasoning.end_of_turn is None  # nothing expects it
    assert answer.end_of_turn is not None


def marked(prompts=60, shift=0.0, **changes):
    """Return four drawn answers of each prompt, half of them right, and their probabilities."""
    count = 4 * prompts
    mark = (np.arange(count) % 2).astype(np.float64)
    values = {
        "prompt": np.repeat(np.arange(prompts), 4), "tokens": np.full(count, 9),
        "nll_sum": np.full(count, 9.0), "agreed": np.full(count, -1),
        "end_sum": np.ones((count, 1)), "kl_sum": np.full(count, 0.01), "mark": mark,
        "drawn_sum": -9.0 + shift * (mark - 0.5),
        "weights_sha256": next(s.content for s in sample.series() if s.label == CELL[0]),
    }  # fmt: skip
    return evidence(**{**values, **changes})


def test_marks_give_the_score_to_expect_and_what_cannot_be_expected_is_not_said():
    full = marked(kl_sum=None)
    same = row(marked(), full)
    assert same.expected_score is not None
    assert same.expected_change is not None
    assert same.expected_score.estimate == pytest.approx(0.5)
    assert same.expected_change.estimate == pytest.approx(0)
    assert same.effective_samples == pytest.approx(240)
    better = row(marked(shift=0.4), full)
    assert better.expected_score is not None
    assert better.expected_score.estimate == pytest.approx(1 / (1 + np.exp(-0.4)))
    assert better.unweighed == ""
    for changes, reason in (
        ({"weights_sha256": "others"}, "answers of other weights than those of `soup`"),
        ({"drawn_sum": None, "unweighed": "the sampler has penalties"}, "penalties"),
        ({"drawn_sum": -9.0 + np.linspace(0, 12, 240)}, "the effective sample size is"),
    ):
        found = row(marked(**changes), full)  # type: ignore[arg-type]
        assert found.expected_score is None
        assert found.expected_change is None
        assert reason in found.unweighed
    plain = row(evidence())
    assert (plain.expected_score, plain.unweighed) == (None, "")


# --------------------------------------------------------------------- which experts are chosen


BLOCKS = np.array([0, 1, 3])
SHARES = np.array([0.99, 0.95, 0.9])
RULE = rule(metric="routing_agreement", margin=0.1, subjects=(A,), schemes=("rtn-4bit",))


def routed(measured, seed=0):
    """Return a measurement with the routing of three layers, the last of which moves most."""
    if measured.scheme == "fp":
        return measured
    rng = np.random.default_rng([seed, measured.calibration_seed])
    tokens = measured.evidence.tokens
    other_LD = (1 - SHARES)[:, None] * rng.uniform(0.5, 1.5, (3, len(tokens))) * tokens
    other_LD *= 1 + 0.3 * measured.calibration_seed  # a draw moves all documents alike
    same = tokens - other_LD.round().astype(np.int64)
    return replace(
        measured, evidence=replace(measured.evidence, routing=Routing(BLOCKS, same, 0.5 * other_LD))
    )


@cache
def measured():
    return tuple(routed(m, seed) for seed, m in enumerate(sample.measurements(16)))


@cache
def audit():
    found = Measurements.of(sample.series(), measured(), 0.95)
    diagnostics, _ = judge_routing(found, Diagnostics())
    return replace(sample.assemble(measured(), sample.series()), diagnostics=diagnostics)


def test_rows_of_measurements_and_layers_have_intervals_and_those_of_layers_hold_at_once():
    found = {(m.subject, m.scheme): m for m in measured()}
    for row in filled(audit().measurements):
        routing = found[row.subject, row.scheme].evidence.routing
        if routing is None:
            assert row.routing_agreement is None and row.routing_moved is None
            continue
        assert row.routing_agreement is not None and row.routing_moved is not None
        assert row.routing_agreement.estimate == pytest.approx(
            routing.same.sum() / (3 * row.tokens)
        )
        assert row.routing_moved.estimate == pytest.approx(routing.moved.sum() / (3 * row.tokens))
        assert row.routing_agreement.low < row.routing_agreement.estimate
    found = measured()
    table = Measurements.of(sample.series(), found, 0.95)
    diagnostics, findings = judge_routing(table, Diagnostics())
    assert not findings
    first = next(m for m in found if m.evidence.routing is not None)
    rows = [
        r for r in diagnostics.routing if (r.subject, r.scheme) == (first.subject, first.scheme)
    ]
    assert [row.block for row in rows] == [0, 1, 3]
    routing, tokens = first.evidence.routing, first.evidence.tokens
    assert routing is not None
    level = statistics.simultaneous(0.95, 3)
    for layer, row in enumerate(rows):
        other = statistics.interval(
            ((tokens - routing.same[layer])[tokens > 0], tokens[tokens > 0]),
            statistics.per_token,
            level,
        )
        assert row.agreement.estimate == pytest.approx(1 - other.estimate)
        assert row.agreement.low == pytest.approx(1 - other.high)
        assert row.moved.estimate == pytest.approx(routing.moved[layer].sum() / tokens.sum())


def test_the_page_has_a_table_and_a_rule_bounds_the_share_of_tokens():
    text = section(whole(audit()), "Routing")
    assert "| rtn-4bit |" in text and "least in block" in text
    assert section(whole(sample.audit(16)), "Routing") == ""
    found = [routed(m) for m in held().table.measurements]
    for margin, outcome in ((0.2, "pass"), (0.02, "fail")):
        (check, *_) = gate(policy(replace(RULE, margin=margin)), of(found), today=TODAY).checks
        assert (check.outcome, check.rule) == (outcome, "QA045")
    (check, *_) = gate(policy(RULE), held(), today=TODAY).checks
    assert check.outcome == "missing"
    assert "the choice of experts of" in check.message and "only models with experts" in check.hint
