from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gate import false_alarms, flaps
from qaudit.core import statistics
from qaudit.errors import UsageError
from qaudit.judge.gate.audits import Pair
from qaudit.judge.gate.checks import Levels, answer, levels_of, mark_known, of_cell
from tests.support.gated import PROTOCOL, SCHEMES, SOUP, A, B, check, held, judged, of, policy, rule

GPTQ, RTN = SCHEMES


def only(subject, **changes):
    return policy(rule(subjects=(subject,), schemes=(GPTQ,), **changes))


def sums(audit, label, scheme):
    return audit.table.find(label, scheme).evidence.nll_sum


def test_all_intervals_that_count_hold_at_once():
    audit = held()
    found = judged(policy(), audit)
    assert found.at_once == 6
    level = 1 - 0.05 / 6  # Bonferroni, by hand
    for label in (A, B, SOUP):
        for scheme in SCHEMES:
            alone = statistics.relative_error(
                sums(audit, label, scheme), sums(audit, label, "fp"), level
            )
            assert check(found, label, scheme).interval == alone


def test_the_end_that_has_to_be_within_the_margin_pays_for_choosing():
    pays = {"relative_error": "high", "tokens_to_divergence": "low"}
    for metric, end in pays.items():
        asked, audit = rule(metric=metric, subjects=("@ships",)), held()
        question = replace(of_cell(asked, audit, None, (A, GPTQ)), at_once=4)
        levels = levels_of(policy(asked), question, 1)._asdict()
        assert levels.pop(end) == pytest.approx(1 - 0.05 / 4)
        assert list(levels.values()) == [0.95]


def test_a_soup_is_held_against_its_best_member():
    for loss, outcome in ((2.8, "pass"), (2.95, "fail"), (3.1, "fail")):
        audit = held(levels={A: 3.0, B: 2.9, SOUP: loss})
        found = judged(only("@soups", metric="soup_against_members", margin=0.0), audit)
        only_check = check(found, SOUP)
        assert (only_check.outcome, only_check.against, found.at_once) == (outcome, B, 2)
        tokens, soup = audit.table.find(A, GPTQ).evidence.tokens, sums(audit, SOUP, GPTQ)
        both = [
            statistics.absolute_change(soup, sums(audit, member, GPTQ), tokens, 1 - 0.05 / 2)
            for member in (A, B)
        ]
        assert only_check.interval.low == max(one.low for one in both)
        assert only_check.interval.high == max(one.high for one in both)


# ----------------------------------------------------------------------- baselines


def baseline(errors=0.01, **changes):
    return replace(held(errors, **changes), name="old")


AGAINST = [("loss_against_baseline", 0.01, "QA021"), ("error_against_baseline", 0.002, "QA022")]


@pytest.mark.parametrize(("metric", "margin", "code"), AGAINST)
@pytest.mark.parametrize(("error", "outcome"), [(0.01, "pass"), (0.03, "fail")])
def test_a_release_is_held_against_the_one_before(metric, margin, code, error, outcome):
    audit, before = held(error), baseline(0.01)
    found = judged(only(A, metric=metric, margin=margin), audit, before)
    compared = check(found, A)
    assert (compared.outcome, compared.rule, compared.against) == (outcome, code, A)
    assert "the baseline's `step1`" in compared.message
    assert found.baseline == "old"
    ours, theirs = sums(audit, A, GPTQ), sums(before, A, GPTQ)
    tokens = audit.table.find(A, GPTQ).evidence.tokens  # type: ignore[union-attr]
    full = sums(audit, A, "fp"), sums(before, A, "fp")
    by_hand = (
        statistics.absolute_change(ours, theirs, tokens)
        if metric == "loss_against_baseline"
        else statistics.interval((ours, full[0], theirs, full[1]), statistics.excess_difference)
    )
    assert compared.interval == by_hand


def test_whether_a_breach_grew_is_judged_at_the_level_that_does_not_pay_for_choosing():
    asked, audit = only(A), held(0.056)
    pair = Pair.of(audit, baseline(0.05, seed=5))
    question = of_cell(asked.rules[0], audit, pair, (A, GPTQ))
    sure = 1 - 1e-12
    for levels, known in ((Levels(0.01, sure), False), (Levels(sure, 0.01), True)):
        breach = answer(question, asked, levels)
        assert breach.outcome == "fail"
        assert mark_known(breach, question, pair, asked, levels).known == known


def test_a_baseline_measured_otherwise_is_refused():
    longer = (
        replace(m, evidence=replace(m.evidence, tokens=m.evidence.tokens + 1))
        for m in baseline().table.measurements
    )
    otherwise = {
        "with a context of 512 tokens": {"context": 512},
        "with `bos=always`": {"bos": "always"},
        "with `packed=true`": {"packed": True},
        "with documents of at most 100 tokens": {"document_tokens": 100},
        "with 8 calibration documents": {"calibration_documents": 8},
        "with calibration seed 3": {"calibration_seed": 3},
        "on other tokens of the same documents": {"corpus_sha256": "d" * 64},
        "in bfloat16": replace(baseline(), dtype="bfloat16"),
        "on 64 documents and `old` on 70, of which 64 are the same": baseline(documents=70),
        "they have different tokenizers": replace(of([*longer]), name="old"),
    }
    for said, before in otherwise.items():
        if isinstance(before, dict):
            before = replace(baseline(), protocol={**PROTOCOL, **before})
        with pytest.raises(UsageError) as refused:
            judged(policy(), held(), before)
        assert said in refused.value.message
        assert "`new`" in refused.value.message
        assert refused.value.hint


# ----------------------------------------------------------------------- what always holds


ORDER = {"fail": 0, "inconclusive": 1, "pass": 2}


@given(st.floats(0.0, 0.1), st.floats(0.0, 0.1))
def test_a_wider_margin_is_never_harder_to_keep(a, b):
    low, high = sorted((a, b))
    narrow, wide = (check(judged(only(A, margin=m), held(0.02)), A) for m in (low, high))
    assert ORDER[narrow.outcome] <= ORDER[wide.outcome]


@given(st.integers(1, 6), st.floats(0.015, 0.025))
def test_asking_more_at_once_never_turns_one_verdict_into_another(more, margin):
    asked = only(A, margin=margin).rules
    others = [rule(name=str(k), margin=1.0) for k in range(more)]
    alone, beside = (judged(policy(*asked, *added), held(0.02)).checks[0] for added in ([], others))
    assert beside.outcome in (alone.outcome, "inconclusive")


# 200 gates of eight cells that are all exactly at the margin: the promise is at most 5 % with any
# breach; by the binomial law a gate that errs in 5 % of cases exceeds 20 with a chance below 0.1 %.
def test_a_gate_breaches_by_chance_in_at_most_one_of_twenty_audits():
    assert false_alarms(documents=40, trials=200, seed=11) <= 20


def test_judging_other_documents_turns_no_pass_into_a_breach():
    """Cells 5 % beyond the margin, where estimates alone turn in every third pair."""
    turned, by_estimate, _ = flaps(documents=40, error=0.021, trials=40, seed=12)
    assert turned <= 3  # of 320; each needs one judgement that is wrong at the simultaneous level
    assert by_estimate > 40
