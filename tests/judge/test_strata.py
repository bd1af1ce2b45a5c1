"""Columns of a measurement, and errors by stratum and position, with their intervals."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core import statistics
from qaudit.core.statistics import counts_of
from qaudit.diagnostics.positions import judge
from qaudit.diagnostics.strata import stratum_rows
from qaudit.judge.gate import GateInput
from qaudit.judge.gate.checks import Levels, answer, plain_question
from qaudit.judge.scores import largest
from qaudit.judge.table import Measurements, fidelity_columns
from qaudit.types import (
    ByConfidence,
    Diagnostics,
    Evidence,
    Fidelity,
    Interval,
    Measurement,
    Policy,
    PolicyRule,
    Positions,
    Subject,
)
from tests.support import sample

CELL = ("soup", "gptq-3bit")
NAMES = ("web", "code", "web", "books")


def grouped(names=NAMES, documents=64):
    """Return the sample with strata and KL divergence."""
    strata = tuple(names[k % len(names)] for k in range(documents))
    measured = [
        replace(m, evidence=with_kl(replace(m.evidence, strata=strata), seed))
        for seed, m in enumerate(sample.measurements(documents))
    ]
    return Measurements.of(sample.series(), measured, 0.95)


def with_kl(evidence, seed):
    count = len(evidence.tokens)
    kl = np.random.default_rng(seed).gamma(2, 0.05, count) * evidence.tokens
    same = np.zeros(count, dtype=np.int64)
    fidelity = Fidelity(kl, kl, np.zeros((count, 3), dtype=np.int64), same, kl)
    return replace(evidence, fidelity=fidelity)


def rows(table):
    return [one for one in stratum_rows(table) if (one.subject, one.scheme) == CELL]


def worst_stratum(table, metric="relative_error", confidence=0.95, margin=0.1):
    """Return the check of a rule about the worst stratum."""
    rule = PolicyRule("worst", metric, margin, strata="worst")
    question = plain_question(rule, GateInput(table), CELL)
    return answer(question, Policy(name="p", rules=(rule,)), Levels(confidence, confidence))


def test_a_row_is_the_error_on_its_documents():
    table = grouped()
    quantized, full = table.find(*CELL), table.full(CELL[0])
    level = 1 - 0.05 / 3
    inside = np.array(quantized.evidence.strata) == "web"
    q, f = quantized.evidence.nll_sum[inside], full.evidence.nll_sum[inside]
    tokens = quantized.evidence.tokens[inside]
    (web,) = (one for one in rows(table) if one.stratum == "web")
    assert (web.documents, web.tokens) == (32, tokens.sum())
    assert web.relative_error == statistics.relative_error(q, f, level)
    assert web.absolute_change == statistics.absolute_change(q, f, tokens, level)
    assert web.ce == statistics.cross_entropy(q, tokens, level)
    kl = quantized.evidence.fidelity.kl_sum[inside]
    assert web.kl == statistics.cross_entropy(kl, tokens, level)
    total = sum(one.ce.estimate * one.tokens for one in rows(table))
    assert total == pytest.approx(quantized.evidence.nll_sum.sum())
    assert sum(one.documents for one in rows(table)) == table.documents
    whole = [one for one in stratum_rows(table) if one.scheme == "fp"]
    assert whole
    assert all(one.relative_error is one.absolute_change is one.kl is None for one in whole)
    assert not any(one.is_worst for one in whole)


def test_the_worst_stratum_is_named_with_the_interval_of_the_largest():
    table = grouped()
    measured, full = table.find(*CELL), table.full(CELL[0])
    worse = np.where(np.array(full.evidence.strata) == "books", 1.1, 1.0)
    evidence = replace(measured.evidence, nll_sum=measured.evidence.nll_sum * worse)
    others = [m for m in table.measurements if m is not measured]
    table = Measurements.of(sample.series(), [*others, replace(measured, evidence=evidence)], 0.95)
    worst = worst_stratum(table)
    assert worst.against == "books"
    assert worst.interval is not None
    at_the_margin = worst_stratum(table, margin=worst.interval.estimate)
    assert "the worst stratum has 16 documents" in at_the_margin.hint
    errors = [one.relative_error for one in rows(table) if one.relative_error is not None]
    assert worst.interval == largest(errors)
    assert [one.stratum for one in rows(table) if one.is_worst] == ["books"]
    narrow = worst_stratum(table, confidence=0.5)
    assert narrow.interval.high < worst.interval.high
    kl = worst_stratum(table, "kl")
    assert kl.interval.estimate == max(one.kl.estimate for one in rows(table) if one.kl is not None)


def test_one_document_leaves_the_worst_open_and_nothing_is_grouped_by_default():
    worst = worst_stratum(grouped(("web",) * 63 + ("code",)))
    assert worst.interval.high == np.inf
    assert worst.interval.low > -np.inf
    table = Measurements.of(sample.series(), sample.measurements(), 0.95)
    assert [*stratum_rows(table)] == []
    assert judge(table, Diagnostics())[0].positions == ()
    assert worst_stratum(table).message == "the documents are not grouped"


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1)), min_size=1))
def test_the_largest_is_within_its_bounds(values):
    intervals = [Interval(value, value - below, value + above) for value, below, above in values]
    whole = largest(intervals)
    assert whole.low <= whole.estimate <= whole.high
    assert largest(intervals[::-1]) == whole


def test_all_strata_are_covered_at_once():
    """A seeded simulation: 400 audits of 4 strata with 16 documents each, at 95 %.

    The standard error of a share of 0.95 in 400 is 0.011; the bound is two of them below.
    """
    rng, true, covered = np.random.default_rng(7), 0.05, 0
    names = tuple("abcd"[k % 4] for k in range(64))
    for _ in range(400):
        tokens = rng.integers(50, 200, 64)
        full = tokens * rng.gamma(9, 1 / 3, 64)
        lost = full * (1 + true * rng.gamma(4, 1 / 4, 64))
        evidence = Evidence((), full, tokens, tokens, strata=names)
        pair = [
            Measurement("a", "fp", "fp", evidence, 16, 0),
            Measurement("a", "q", "q", replace(evidence, nll_sum=lost), 4, 0),
        ]
        table = Measurements.of([Subject("a", ())], pair, 0.95)
        intervals = [one.relative_error for one in stratum_rows(table) if one.relative_error]
        assert len(intervals) == 4
        covered += all(one.low <= true <= one.high for one in intervals)
    assert covered / 400 > 0.928


def with_positions():
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, 50, (12, 3))
    tokens[:4, 2] = 0  # documents that end before the last bin
    full = tokens * rng.gamma(9, 1 / 3, (12, 3))
    lost = full * np.array([1.01, 1.02, 1.3])
    base = Evidence(tuple("abcdefghijkl"), full.sum(1), tokens.sum(1), tokens.sum(1))
    edges = np.array([0, 16, 64, 256])
    kl = tokens * rng.gamma(2, 0.1, (12, 3))
    whole = replace(base, positions=Positions(edges, tokens, full))
    quantized = replace(base, nll_sum=lost.sum(1), positions=Positions(edges, tokens, lost, kl))
    pair = [
        Measurement("a", "fp", "fp", whole, 16, 0), Measurement("a", "q", "q", quantized, 4, 0)
    ]  # fmt: skip
    return Measurements.of([Subject("a", ())], pair, 0.95), tokens, full, lost


def test_a_bin_is_the_error_on_the_tokens_in_it():
    table, tokens, full, lost = with_positions()
    rows = judge(table, Diagnostics())[0].positions
    first, *_, last = rows
    assert (first.scheme, first.first, first.last) == ("fp", 0, 15)
    assert first.relative_error is first.kl is None
    inside = tokens[:, 2] > 0
    assert (last.first, last.last, last.documents) == (64, 255, 8)
    assert last.tokens == tokens[:, 2].sum()
    level = 1 - 0.05 / 3
    pair = lost[inside, 2], full[inside, 2]
    assert last.relative_error == statistics.relative_error(*pair, level)
    assert last.absolute_change == statistics.absolute_change(*pair, tokens[inside, 2], level)
    assert last.relative_error.estimate == pytest.approx(0.3)
    assert last.kl.estimate > 0


DOCUMENTS, TOKENS = 40, 150


def evidence(seed=0):
    """Return evidence of documents that differ, the last without a scored token, and the KLs."""
    draw = np.random.default_rng(seed)
    level_D = 0.5 * draw.standard_normal(DOCUMENTS)
    kl_DT = np.exp(-4 + level_D[:, None] + draw.standard_normal((DOCUMENTS, TOKENS)))
    document_N = np.repeat(np.arange(DOCUMENTS), TOKENS)
    same_DT = draw.random((DOCUMENTS, TOKENS)) < 0.9
    tokens = np.array([TOKENS] * DOCUMENTS + [0])

    def ended(sums_D):
        return np.append(sums_D, 0)

    fidelity = Fidelity(
        kl_sum=ended(kl_DT.sum(1)),
        kl_max=ended(kl_DT.max(1)),
        kl_counts=counts_of(kl_DT.ravel(), document_N, DOCUMENTS + 1),
        same_top=ended(same_DT.sum(1)),
        squared_dp_sum=ended((0.01 * kl_DT).sum(1)),
    )
    shas = tuple(f"{k:064d}" for k in range(DOCUMENTS + 1))
    return Evidence(shas, tokens * 2.0, tokens, tokens * 4, fidelity=fidelity), kl_DT


def test_means_and_quantiles_are_those_of_all_tokens_with_the_interval_of_documents():
    one, kl_DT = evidence()
    columns = fidelity_columns(one, 0.95)
    known = statistics.interval((kl_DT.sum(1), np.full(DOCUMENTS, TOKENS)), statistics.per_token)
    assert columns["kl"].low == pytest.approx(known.low)
    assert columns["kl"].high == pytest.approx(known.high)
    assert columns["kl"].estimate == pytest.approx(kl_DT.mean())
    assert columns["rms_dp"].estimate == pytest.approx(math.sqrt(0.01 * kl_DT.mean()))
    assert columns["top1_agreement"].estimate == pytest.approx(0.9, abs=0.02)
    for name in ("kl", "top1_agreement", "rms_dp"):
        assert columns[name].low < columns[name].estimate < columns[name].high
    for name, share in (("kl_p50", 0.5), ("kl_p90", 0.9), ("kl_p99", 0.99), ("kl_p999", 0.999)):
        # Of all tokens, within a bin.
        assert columns[name].estimate == pytest.approx(np.quantile(kl_DT, share), rel=0.09)
        assert columns[name].low < columns[name].estimate < columns[name].high
    assert columns["kl_max"] == kl_DT.max()


def test_sure_flips_are_a_part_of_the_tokens_that_full_precision_is_sure_of():
    one, kl_DT = evidence()
    assert "sure_flips" not in fidelity_columns(one, 0.95)
    draw = np.random.default_rng(1)
    bucket_DT = draw.integers(0, 4, kl_DT.shape)
    flip_DT = draw.random(kl_DT.shape) < np.array([0.3, 0.2, 0.1, 0.02])[bucket_DT]

    def summed(values_DT):
        sums = [(values_DT * (bucket_DT == bucket)).sum(1) for bucket in range(4)]
        return np.vstack([np.stack(sums, 1), np.zeros(4)])

    sums = ByConfidence(
        summed(np.ones_like(kl_DT)).astype(int), summed(kl_DT), summed(flip_DT).astype(int)
    )
    one = replace(one, fidelity=replace(one.fidelity, by_confidence=sums))
    columns = fidelity_columns(one, 0.95)
    sure_DT = bucket_DT >= 2
    by_document = (flip_DT & sure_DT).sum(1), sure_DT.sum(1)
    assert columns["sure_flips"] == statistics.interval(by_document, statistics.per_token)
    assert columns["confidence_shares"] == pytest.approx(
        [np.mean(bucket_DT == k) for k in range(4)]
    )
    assert columns["confidence_kl"] == pytest.approx(
        [kl_DT[bucket_DT == k].mean() for k in range(4)]
    )


def test_a_bound_is_never_what_the_quantity_cannot_be():
    one, _ = evidence()
    every = np.append(np.full(DOCUMENTS, TOKENS), 0)
    every[0] -= 30
    rare = np.zeros(DOCUMENTS + 1)
    rare[3] = 1.0
    one = replace(one, fidelity=replace(one.fidelity, same_top=every, kl_sum=rare))
    columns = fidelity_columns(one, 0.95)
    assert columns["top1_agreement"].high == 1.0
    assert columns["kl"].low == 0.0


def test_what_was_not_compared_has_no_columns_and_one_document_no_bounds():
    one, kl_DT = evidence()
    assert fidelity_columns(replace(one, fidelity=None), 0.95) == {}
    nothing = replace(one, tokens=np.zeros_like(one.tokens))
    assert fidelity_columns(nothing, 0.95) == {}
    alone = replace(one, tokens=np.array([TOKENS] + [0] * DOCUMENTS))
    columns = fidelity_columns(alone, 0.95)
    assert columns["kl"].estimate == pytest.approx(kl_DT[0].mean())
    assert (columns["kl"].low, columns["kl"].high) == (0.0, math.inf)
    assert (columns["kl_p50"].low, columns["kl_p50"].high) == (0.0, math.inf)
