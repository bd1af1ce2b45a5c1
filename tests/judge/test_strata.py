"""Errors by stratum and by position: sums of the documents in question, and intervals of all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core import statistics
from qaudit.diagnostics.positions import judge
from qaudit.diagnostics.strata import stratum_rows
from qaudit.judge.scores import largest, worst_stratum
from qaudit.judge.table import Measurements
from qaudit.types import (
    Diagnostics,
    Evidence,
    Fidelity,
    Interval,
    Measurement,
    Positions,
    StratumRow,
    Subject,
)
from tests.support import sample

CELL = ("soup", "gptq-3bit")
NAMES = ("web", "code", "web", "books")


def grouped(names: tuple[str, ...] = NAMES, documents: int = 64) -> Measurements:
    """Return the sample with strata and KL divergence."""
    strata = tuple(names[k % len(names)] for k in range(documents))
    measured = [
        replace(m, evidence=with_kl(replace(m.evidence, strata=strata), seed))
        for seed, m in enumerate(sample.measurements(documents))
    ]
    return Measurements.of(sample.series(), measured, 0.95)


def with_kl(evidence: Evidence, seed: int) -> Evidence:
    count = len(evidence.tokens)
    kl = np.random.default_rng(seed).gamma(2, 0.05, count) * evidence.tokens
    same = np.zeros(count, dtype=np.int64)
    fidelity = Fidelity(kl, kl, np.zeros((count, 3), dtype=np.int64), same, kl)
    return replace(evidence, fidelity=fidelity)


def rows(table: Measurements) -> list[StratumRow]:
    return [one for one in stratum_rows(table) if (one.subject, one.scheme) == CELL]


def test_a_row_is_the_error_on_its_documents() -> None:
    table = grouped()
    quantized, full = table.find(*CELL), table.full(CELL[0])
    assert quantized is not None and full is not None and quantized.evidence.fidelity is not None
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


def test_the_worst_stratum_is_named_with_the_interval_of_the_largest() -> None:
    table = grouped()
    measured, full = table.find(*CELL), table.full(CELL[0])
    assert measured is not None and full is not None
    worse = np.where(np.array(full.evidence.strata) == "books", 1.1, 1.0)
    evidence = replace(measured.evidence, nll_sum=measured.evidence.nll_sum * worse)
    others = [m for m in table.measurements if m is not measured]
    table = Measurements.of(sample.series(), [*others, replace(measured, evidence=evidence)], 0.95)
    worst = worst_stratum(table, CELL)
    assert worst is not None
    assert (worst.stratum, worst.strata, worst.documents) == ("books", 3, 16)
    errors = [one.relative_error for one in rows(table) if one.relative_error is not None]
    assert worst.interval == largest(errors)
    assert [one.stratum for one in rows(table) if one.is_worst] == ["books"]
    narrow = worst_stratum(table, CELL, confidence=0.5)
    assert narrow is not None and narrow.interval.high < worst.interval.high
    kl = worst_stratum(table, CELL, "kl")
    assert kl is not None and kl.interval.estimate == max(
        one.kl.estimate for one in rows(table) if one.kl is not None
    )


def test_one_document_leaves_the_worst_open_and_nothing_is_grouped_by_default() -> None:
    worst = worst_stratum(grouped(("web",) * 63 + ("code",)), CELL)
    assert worst is not None
    assert worst.interval.high == np.inf
    assert worst.interval.low > -np.inf
    table = Measurements.of(sample.series(), sample.measurements(), 0.95)
    assert [*stratum_rows(table)] == []
    assert judge(table, Diagnostics())[0].positions == ()
    assert worst_stratum(table, CELL) is None
    assert worst_stratum(grouped(), (CELL[0], "fp")) is None
    assert worst_stratum(grouped(), ("nothing", "fp")) is None


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1)), min_size=1))
def test_the_largest_is_within_its_bounds(values: list[tuple[float, float, float]]) -> None:
    intervals = [Interval(value, value - below, value + above) for value, below, above in values]
    whole = largest(intervals)
    assert whole.low <= whole.estimate <= whole.high
    assert largest(intervals[::-1]) == whole


def test_all_strata_are_covered_at_once() -> None:
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


def with_positions() -> tuple[Measurements, np.ndarray, np.ndarray, np.ndarray]:
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


def test_a_bin_is_the_error_on_the_tokens_in_it() -> None:
    table, tokens, full, lost = with_positions()
    rows: Any = judge(table, Diagnostics())[0].positions
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
