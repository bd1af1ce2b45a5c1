"""Intervals for losses and differences of losses, paired and clustered by document.

The unit of analysis is the document: tokens of one document share their difficulty, so that
an interval that counts tokens as independent is too narrow. Every quantity here is a smooth
function of per-document sums added up over the documents (loss per token is sum of nll over
sum of tokens), and all subjects are measured on the same documents, so that one recipe serves
all of them and the pairing comes by itself:

- the delete-one jackknife gives each document's influence u_d and with it a standard error
  (Efron and Stein 1981), exact for ratios to the order that matters;
- Student's t with fewer degrees of freedom where the influences have heavy tails, after
  Satterthwaite (1946): a few heavy documents are worth less than their number;
- on the side to which the influences are skewed, the interval reaches further by a multiple
  of the Cornish-Fisher term of the studentized mean (Johnson 1978, Hall 1992). It never
  reaches less far on the other side: skewness is estimated badly when it matters most;
- both sides are 1 + 1/n wider, because all this is estimated from the same few documents.

Samples understate skewness and scatter in kurtosis; the two constants below correct for that
and were chosen by simulation. `benchmarks/coverage.py` shows the coverage. It is closed-form:
nothing is drawn, the same evidence gives the same interval everywhere. Given up: the plain
jackknife, which covers 88 to 92 % of skewed damage where 95 % was promised, and the
studentized bootstrap, which covers no better than this and costs a thousand times as much.
What no interval over documents can know is damage that is rare: where one document in fifty loses
27 times as much as the others, many samples hold none of these and give a narrow interval around
too little. Then 55 to 64 % are covered at 10 to 50 documents; `judge.rare` shows the sign of it.

Shapes: D documents, K sums per document.

**Histograms** of a positive quantity, one for each document, and quantiles of them.

Bins are logarithmic, 8 to an octave from 2^-40 to 2^8, so that a quantile is known within 9 %, and
it is interpolated inside a bin. What is below, zero included, counts in the first bin, what is
above in the last one.

The interval of a quantile is Woodruff's (1952), clustered by document: the share of tokens below
the quantile is a ratio of sums over documents, with the interval above, and that
interval is read back as quantiles. Where it reaches the share 1, the quantile has no upper bound:
the text has no token beyond it. There is no interval of a maximum.

Shapes: D documents, B bins, N tokens.

**Documents** that a verdict or an interval needs, by what a pilot shows of their scatter.

With n documents in place of the pilot's n0 a standard error shrinks by sqrt(n0 / n), and what an
interval reaches beyond it is computed for n (`reach`). Where no feasible number does,
the result is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy  # its parts load where they are first used

from qaudit.types import Interval

Array = npt.NDArray[np.float64]
Sums = npt.ArrayLike
Statistic = Callable[[Array], Any]
"""Sums (K, ...) to values (...)."""

MINIMUM_DOCUMENTS = 10
"""With fewer documents an interval is shown and no verdict is drawn from it."""

KURTOSIS_WEIGHT = 1 / 3  # 1/2 if the kurtosis were known
SKEWNESS_WEIGHT = 1 / 3  # 1/6 if the skewness were known

UNKNOWN = Interval(math.inf, -math.inf, math.inf)
"""The interval of a number that is not finite."""


def interval(sums: Sequence[Sums], statistic: Statistic, confidence: float = 0.95) -> Interval:
    return estimated(sums, statistic, confidence).interval


@dataclass(frozen=True)
class Estimate:
    """A quantity with its interval, and how far documents scatter it; None where unknown."""

    interval: Interval
    spread: Spread | None = None


def estimated(sums: Sequence[Sums], statistic: Statistic, confidence: float = 0.95) -> Estimate:
    estimate, influence_D = influences(sums, statistic)
    if not math.isfinite(estimate):
        return Estimate(UNKNOWN)
    if influence_D is None:
        return Estimate(Interval(estimate, -math.inf, math.inf))
    spread = spread_of(influence_D)
    below, above = reach(spread, confidence)
    return Estimate(Interval(estimate, estimate - below, estimate + above), spread)


def influences(sums: Sequence[Sums], statistic: Statistic) -> tuple[float, Array | None]:
    """Return the statistic and each document's influence on it, or none where that is unknown."""
    sums_KD = np.stack([np.asarray(column, dtype=np.float64) for column in sums])
    total_K1 = sums_KD.sum(axis=1, keepdims=True)
    with np.errstate(all="ignore"):  # a division by zero ends as a number that is not finite
        estimate = float(statistic(total_K1)[0])
        without_D = np.asarray(statistic(total_K1 - sums_KD), dtype=np.float64)
    documents = sums_KD.shape[1]
    if documents < 2 or not math.isfinite(estimate) or not np.isfinite(without_D).all():
        return estimate, None
    return estimate, (documents - 1) * (without_D.mean() - without_D)


@dataclass(frozen=True)
class Spread:
    """How far documents scatter a statistic: standard error, degrees of freedom, skewness."""

    documents: int
    standard_error: float
    freedom: float
    skewness: float


def spread_of(influence_D: Array) -> Spread:
    """Return the spread that influences make; equal ones, by rounding alone, make none."""
    n = len(influence_D)
    second = float((influence_D**2).mean())
    if second <= 0.0:
        return Spread(n, 0.0, max(2.0, n - 1), 0.0)
    skewness, excess = _shape(influence_D / math.sqrt(second))
    # Below two degrees of freedom t has no variance, and an interval no useful width.
    freedom = max(2.0, (n - 1) / (1 + KURTOSIS_WEIGHT * excess * (n - 1) / n))
    return Spread(n, math.sqrt(second / (n - 1)), freedom, skewness)


def reach(spread: Spread, confidence: float) -> tuple[float, float]:
    """Return how far the interval reaches below and above the estimate."""
    n = spread.documents
    quantile = float(scipy.special.stdtrit(spread.freedom, 0.5 + confidence / 2))
    # A normal quantile: t with few degrees of freedom, squared, would follow one document anywhere.
    normal = float(scipy.special.ndtri(0.5 + confidence / 2))
    shift = SKEWNESS_WEIGHT * spread.skewness * (1 + 2 * normal**2) / math.sqrt(n)
    half = quantile * (1 + 1 / n)
    below, above = half + max(-shift, 0.0), half + max(shift, 0.0)
    return spread.standard_error * below, spread.standard_error * above


def _shape(standardized_D: Array) -> tuple[float, float]:
    """Return sample skewness and excess kurtosis (not below 0), corrected for sample size."""
    n = len(standardized_D)
    if n < 4:
        return 0.0, 0.0
    skewness = float((standardized_D**3).mean()) * math.sqrt(n * (n - 1)) / (n - 2)
    excess = float((standardized_D**4).mean()) - 3
    corrected = (n - 1) / ((n - 2) * (n - 3)) * ((n + 1) * excess + 6)
    return skewness, max(0.0, corrected)


def per_token(sums: Array) -> Any:
    """Return a loss per token; sums are (nll, tokens)."""
    return sums[0] / sums[1]


def excess(sums: Array) -> Any:
    """Return by what part of a loss another is higher; sums are (nll, nll of full precision)."""
    return sums[0] / sums[1] - 1


def change(sums: Array) -> Any:
    """Return the difference of two losses per token; sums are (nll, nll, tokens)."""
    return (sums[0] - sums[1]) / sums[2]


def change_difference(sums: Array) -> Any:
    """Return the difference of two changes; sums are (a, a in full, b, b in full, tokens)."""
    return (sums[0] - sums[1] - sums[2] + sums[3]) / sums[4]


def excess_difference(sums: Array) -> Any:
    """Return the difference of two relative errors; sums are (a, a in full, b, b in full)."""
    return sums[0] / sums[1] - sums[2] / sums[3]


def cross_entropy(nll: Sums, tokens: Sums, confidence: float = 0.95) -> Interval:
    return interval((nll, tokens), per_token, confidence)


def relative_error(quantized: Sums, full: Sums, confidence: float = 0.95) -> Interval:
    return interval((quantized, full), excess, confidence)


def absolute_change(a: Sums, b: Sums, tokens: Sums, confidence: float = 0.95) -> Interval:
    """Return CE(a) - CE(b), in nats per token: of full precision, or of another model."""
    return interval((a, b, tokens), change, confidence)


def bits_per_byte(nll: Sums, nbytes: Sums) -> float:
    """Return the loss in bits per byte of text, comparable across tokenizers."""
    total = float(np.sum(nbytes))
    return float(np.sum(nll)) / total / math.log(2) if total > 0 else math.inf


def perplexity(ce: float) -> float:
    """Return e to the loss, infinity where that overflows."""
    return math.exp(ce) if ce < 709 else math.inf


def within(interval: Interval, low: float, high: float) -> Interval:
    """Return an interval without what the quantity cannot be."""
    return Interval(interval.estimate, max(interval.low, low), min(interval.high, high))


def median(values: npt.ArrayLike, confidence: float = 0.95) -> Interval:
    """Return the median of independent values, some infinite, with its interval by ranks."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    count = len(ordered)
    # Of ranks 1 to n, the true median is between r and n + 1 - r with this confidence at least.
    upto = scipy.special.bdtr(np.arange(count), count, 0.5)
    rank = int(np.searchsorted(upto, (1 - confidence) / 2))
    low, high = (ordered[rank - 1], ordered[count - rank]) if rank else (-np.inf, np.inf)
    return Interval(float(ordered[(count - 1) // 2]), float(low), float(high))


def accuracy(correct: npt.ArrayLike, confidence: float = 0.95) -> Interval:
    """Return the share of correct items with Wilson's interval, which never has width zero."""
    hits = np.asarray(correct, dtype=np.float64)
    n, share = len(hits), float(hits.mean())
    z = float(scipy.special.ndtri(0.5 + confidence / 2))
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(share, max(0.0, center - half), min(1.0, center + half))


def spread_from(result: Interval, documents: int, confidence: float) -> Spread:
    """Return the spread that makes an interval of so many documents, by its longer side."""
    reached = max(result.estimate - result.low, result.high - result.estimate)
    quantile = float(scipy.special.stdtrit(max(1, documents - 1), 0.5 + confidence / 2))
    return Spread(documents, reached / (quantile * (1 + 1 / documents)), documents - 1.0, 0.0)


def crossed(sums_RD: Array, below_D: Sums, confidence: float = 0.95) -> Interval:
    """Return a ratio whose sums were drawn R times on the same documents, over both.

    Each part has a quantile of its own, and squares of half widths add up (the method of variance
    estimates recovery, Zou and Donner 2008). What draws differ by because they treat documents
    differently is in the scatter of documents already, and is taken out once.
    """
    draws, documents = sums_RD.shape
    mean_D = sums_RD.mean(axis=0)
    result = estimated((mean_D, below_D), per_token, confidence)
    total, spread = float(mean_D.sum()), result.spread
    if spread is None or draws < 2 or total == 0.0:
        return result.interval
    moved_R = sums_RD.sum(axis=1) / total - 1
    apart_RD = sums_RD - mean_D - np.outer(moved_R, mean_D)
    scatter = float((apart_RD**2).sum()) / (draws - 1) * documents / max(1, documents - 1)
    level, whole = 0.5 + confidence / 2, result.interval
    of_draw = float(scipy.special.stdtrit(draws - 1, level)) ** 2 * float(np.var(moved_R, ddof=1))
    of_document = float(scipy.special.stdtrit(spread.freedom, level)) * (1 + 1 / documents)
    added = max(0.0, of_draw - of_document**2 * scatter / total**2)
    more = abs(whole.estimate) * math.sqrt(added / draws)
    below, above = whole.estimate - whole.low, whole.high - whole.estimate
    return Interval(
        whole.estimate,
        whole.estimate - math.hypot(below, more),
        whole.estimate + math.hypot(above, more),
    )


def simultaneous(confidence: float, comparisons: int) -> float:
    """Return the confidence each of several intervals needs for all to hold (Bonferroni)."""
    return 1 - (1 - confidence) / max(1, comparisons)


def widening(confidence: float, intervals: int, documents: int) -> float:
    """Return how many times wider intervals have to be read for all of them to hold at once."""
    freedom = max(1, documents - 1)
    alone, all_of_them = (
        float(scipy.special.stdtrit(freedom, 0.5 + level / 2))
        for level in (confidence, simultaneous(confidence, intervals))
    )
    return all_of_them / alone if alone > 0 else math.inf


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


POWER = 0.8
BOUND = 0.8
MOST = 10**7  # documents: beyond that no audit is feasible
MOST_TO_DECIDE = 4096
"""Documents: what takes more to decide is at its margin."""


def documents_to_decide(
    interval: Interval, error: float, documents: int, margin: float
) -> int | None:
    """Return how many documents decide on which side of a margin a quantity is, with `POWER`.

    `interval` and the standard `error` are of so many documents. What was measured stays among
    more, which move the estimate by sqrt(1 - N/n) standard errors, and both ends come nearer with
    sqrt(N/n). None beyond `MOST_TO_DECIDE`: the quantity is at the margin.
    """
    below, above = interval.estimate - interval.low, interval.high - interval.estimate
    if not all(map(math.isfinite, (interval.estimate, below, above, error))) or error <= 0.0:
        return None

    def is_enough(count: int) -> bool:
        near, moved = math.sqrt(documents / count), error * math.sqrt(1 - documents / count)
        distance = margin - interval.estimate
        chance = scipy.special.ndtr((distance - above * near) / moved)
        return bool(chance + scipy.special.ndtr((-distance - below * near) / moved) >= POWER)

    return _smallest(is_enough, max(MINIMUM_DOCUMENTS, documents + 1), MOST_TO_DECIDE)


def documents_for_width(
    columns: Sequence[Sums], statistic: Statistic, share: float, confidence: float = 0.95
) -> int | None:
    """Return how many documents make an interval over documents reach so far, as a share.

    The reach is that of its longer side, the share one of the estimate. None where no feasible
    number does, as with an estimate of zero.
    """
    result = estimated(columns, statistic)
    target, spread = share * abs(result.interval.estimate), result.spread
    if spread is None or not 0.0 < target < math.inf:
        return None

    def is_enough(count: int) -> bool:
        share = count / spread.documents
        freedom = min(max(2.0, spread.freedom * share), max(2.0, count - 1.0))
        error = spread.standard_error / math.sqrt(share)
        return max(reach(Spread(count, error, freedom, spread.skewness), confidence)) <= target

    return _smallest(is_enough, MINIMUM_DOCUMENTS, MOST)


def detectable(columns: Sequence[Sums], statistic: Statistic, confidence: float = 0.95) -> float:
    """Return the effect that as many documents find in `POWER` of all cases.

    A pilot knows the scatter of documents with heavy tails badly: the upper bound is taken that
    holds for `BOUND` of all pilots.
    """
    spread = estimated(columns, statistic).spread
    if spread is None:
        return math.inf
    upper = math.sqrt(spread.freedom / float(scipy.special.chdtri(spread.freedom, BOUND)))
    spread = replace(spread, standard_error=spread.standard_error * upper)
    return (
        max(reach(spread, confidence)) + float(scipy.special.ndtri(POWER)) * spread.standard_error
    )


def items_to_detect(
    interval: Interval, items: int, margin: float, confidence: float = 0.95
) -> int | None:
    """Return how many items find that a change of accuracy is not the margin.

    `interval` is over so many items, and as many more of the same tasks would narrow it with the
    square root of their number. None where no feasible number does.
    """
    effect = abs(interval.estimate - margin)
    reached = interval.estimate - interval.low
    if interval.estimate <= margin:
        reached = interval.high - interval.estimate
    quantile = float(scipy.special.ndtri(0.5 + confidence / 2))
    if not 0.0 < effect < math.inf or not math.isfinite(reached):
        return None
    power = float(scipy.special.ndtri(POWER))

    def enough(count: int) -> bool:
        reach_there = reached * math.sqrt(items / count)
        return reach_there + power * reach_there / quantile <= effect

    return _smallest(enough, MINIMUM_DOCUMENTS, MOST)


def _smallest(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the smallest number that is enough, where more is never worse."""
    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
