"""Columns of a measurement that was compared with full precision, from sums over documents."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from qaudit.core import statistics
from qaudit.core.statistics import counts_of
from qaudit.judge.table import fidelity_columns
from qaudit.types import ByConfidence, Evidence, Fidelity

DOCUMENTS, TOKENS = 40, 150


def evidence(seed: int = 0) -> tuple[Evidence, np.ndarray]:
    """Return evidence of documents that differ, the last without a scored token, and the KLs."""
    draw = np.random.default_rng(seed)
    level_D = 0.5 * draw.standard_normal(DOCUMENTS)
    kl_DT = np.exp(-4 + level_D[:, None] + draw.standard_normal((DOCUMENTS, TOKENS)))
    document_N = np.repeat(np.arange(DOCUMENTS), TOKENS)
    same_DT = draw.random((DOCUMENTS, TOKENS)) < 0.9
    tokens = np.array([TOKENS] * DOCUMENTS + [0])

    def ended(sums_D: np.ndarray) -> np.ndarray:
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


def test_means_and_quantiles_are_those_of_all_tokens_with_the_interval_of_documents() -> None:
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


def test_sure_flips_are_a_part_of_the_tokens_that_full_precision_is_sure_of() -> None:
    one, kl_DT = evidence()
    assert one.fidelity is not None
    assert "sure_flips" not in fidelity_columns(one, 0.95)
    draw = np.random.default_rng(1)
    bucket_DT = draw.integers(0, 4, kl_DT.shape)
    flip_DT = draw.random(kl_DT.shape) < np.array([0.3, 0.2, 0.1, 0.02])[bucket_DT]

    def summed(values_DT: np.ndarray) -> np.ndarray:
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


def test_a_bound_is_never_what_the_quantity_cannot_be() -> None:
    one, _ = evidence()
    assert one.fidelity is not None
    every = np.append(np.full(DOCUMENTS, TOKENS), 0)
    every[0] -= 30
    rare = np.zeros(DOCUMENTS + 1)
    rare[3] = 1.0
    one = replace(one, fidelity=replace(one.fidelity, same_top=every, kl_sum=rare))
    columns = fidelity_columns(one, 0.95)
    assert columns["top1_agreement"].high == 1.0
    assert columns["kl"].low == 0.0


def test_what_was_not_compared_has_no_columns_and_one_document_no_bounds() -> None:
    one, kl_DT = evidence()
    assert fidelity_columns(replace(one, fidelity=None), 0.95) == {}
    nothing = replace(one, tokens=np.zeros_like(one.tokens))
    assert fidelity_columns(nothing, 0.95) == {}
    alone = replace(one, tokens=np.array([TOKENS] + [0] * DOCUMENTS))
    columns = fidelity_columns(alone, 0.95)
    assert columns["kl"].estimate == pytest.approx(kl_DT[0].mean())
    assert (columns["kl"].low, columns["kl"].high) == (0.0, math.inf)
    assert (columns["kl_p50"].low, columns["kl_p50"].high) == (0.0, math.inf)
