"""Histograms of a positive quantity, one for each document, and quantiles of them.

Bins are logarithmic, 8 to an octave from 2^-40 to 2^8, so that a quantile is known within 9 %, and
it is interpolated inside a bin. What is below, zero included, counts in the first bin, what is
above in the last one.

The interval of a quantile is Woodruff's (1952), clustered by document: the share of tokens below
the quantile is a ratio of sums over documents, with the interval of `core.statistics`, and that
interval is read back as quantiles. Where it reaches the share 1, the quantile has no upper bound:
the text has no token beyond it. There is no interval of a maximum.

Shapes: D documents, B bins, N tokens.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from qaudit.core.statistics import Array, interval, per_token
from qaudit.types import Interval

LOWEST, HIGHEST = -40, 8  # powers of two
PER_OCTAVE = 8
BINS = (HIGHEST - LOWEST) * PER_OCTAVE

Counts = npt.NDArray[np.integer]


def counts_of(values_N: Array, document_N: npt.NDArray[np.integer], documents: int) -> Counts:
    """Count every document's values, in the smallest type that holds the counts."""
    with np.errstate(divide="ignore"):
        place_N = np.floor((np.log2(values_N) - LOWEST) * PER_OCTAVE)
    bin_N = np.clip(place_N, 0, BINS - 1).astype(np.int64)
    flat = np.bincount(document_N * BINS + bin_N, minlength=documents * BINS)
    return flat.reshape(documents, BINS).astype(np.min_scalar_type(int(flat.max(initial=0))))


def quantile(counts_DB: Counts, share: float) -> float:
    """Return the value that this share is below: 0 for none of them, infinity for all."""
    upto_B = counts_DB.sum(axis=0, dtype=np.int64).cumsum()
    total = int(upto_B[-1])
    if total == 0:
        return math.nan
    if not 0 < share < 1:
        return 0.0 if share <= 0 else math.inf
    wanted = share * total
    b = int(np.searchsorted(upto_B, wanted, side="right"))
    before = int(upto_B[b - 1]) if b else 0
    within = (wanted - before) / (int(upto_B[b]) - before)
    return float(2.0 ** (LOWEST + (b + within) / PER_OCTAVE))


def quantile_interval(counts_DB: Counts, share: float, confidence: float = 0.95) -> Interval:
    """Return a quantile with its interval, documents being the clusters."""
    estimate = quantile(counts_DB, share)
    place = (math.log2(estimate) - LOWEST) * PER_OCTAVE
    b = min(int(place), BINS - 1)
    below_D = counts_DB[:, :b].sum(axis=1, dtype=np.float64) + (place - b) * counts_DB[:, b]
    tokens_D = counts_DB.sum(axis=1, dtype=np.float64)
    below = interval((below_D, tokens_D), per_token, confidence)
    # The true quantile is where the share below may be `share`.
    low = quantile(counts_DB, share - (below.high - below.estimate))
    high = quantile(counts_DB, share + (below.estimate - below.low))
    return Interval(estimate, min(low, estimate), max(high, estimate))
