"""Quantiles from histograms of documents, and the coverage of their intervals."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.statistics import BINS, counts_of, quantile, quantile_interval


def counts(values_N, document_N=None):
    values_N = np.asarray(values_N, dtype=np.float64)
    document_N = np.zeros(len(values_N), dtype=np.int64) if document_N is None else document_N
    return counts_of(values_N, document_N, int(document_N.max()) + 1)


@given(st.lists(st.floats(1e-11, 200), min_size=1, max_size=200), st.floats(0.001, 0.999))
def test_a_quantile_is_within_a_bin_of_the_values_it_is_between(values, share):
    values_N = np.sort(values)
    place = share * len(values_N)
    # A bin is a twelfth of a factor of two wide at most: 2^(1/8) = 1.09.
    low = values_N[min(len(values_N) - 1, math.floor(place))] / 1.091
    high = values_N[min(len(values_N) - 1, math.ceil(place))] * 1.091
    assert low <= quantile(counts(values_N), share) <= high


def test_what_is_off_the_scale_counts_in_the_last_bins():
    counted = counts([0.0, 1e-30, 1e9])
    assert counted[0, 0] == 2
    assert counted[0, BINS - 1] == 1
    assert counted.sum() == 3


def test_documents_are_counted_apart_and_in_a_small_type():
    counted = counts([1.0, 1.0, 2.0], np.array([0, 2, 2]))
    assert counted.shape == (3, BINS)
    assert counted.sum(axis=1).tolist() == [1, 0, 2]
    assert counted.dtype == np.uint8
    assert counts(np.ones(300)).dtype == np.uint16


def test_no_and_all_tokens_have_no_quantile():
    assert quantile(counts([1.0, 2.0]), 0.0) == 0.0
    assert quantile(counts([1.0, 2.0]), 1.0) == math.inf
    assert math.isnan(quantile(np.zeros((3, BINS), dtype=np.uint8), 0.5))


def test_a_quantile_that_the_text_does_not_reach_beyond_has_no_upper_bound():
    draw = np.random.default_rng(0)
    document_N = np.repeat(np.arange(8), 20)
    known = quantile_interval(counts(draw.lognormal(-3, 1, 160), document_N), 0.999)
    assert known.high == math.inf
    assert 0 < known.low <= known.estimate < math.inf


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_the_interval_covers_the_quantile_of_documents_that_differ(share):
    """64 documents of 200 tokens; a document's level scatters as much as a third of its tokens'."""
    draw = np.random.default_rng(1)
    document_N = np.repeat(np.arange(64), 200)

    def sample(documents, tokens):
        level_D = -4 + 0.5 * draw.standard_normal(documents)
        return np.exp(np.repeat(level_D, tokens) + 1.5 * draw.standard_normal(documents * tokens))

    truth = float(np.quantile(sample(50_000, 40), share))
    runs = 300
    known = [quantile_interval(counts(sample(64, 200), document_N), share) for _ in range(runs)]
    held = sum(one.low <= truth <= one.high for one in known) / runs
    # Three standard errors of 300 runs are 3.8 points; 95 % is promised.
    assert 0.912 <= held <= 0.995
