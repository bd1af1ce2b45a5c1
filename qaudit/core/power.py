"""Documents that a verdict or an interval needs, by what a pilot shows of their scatter.

With n documents in place of the pilot's n0 a standard error shrinks by sqrt(n0 / n), and what an
interval reaches beyond it is computed for n (`statistics.reach`). Where no feasible number does,
the result is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import scipy  # its parts load where they are first used

from qaudit.core.statistics import (
    MINIMUM_DOCUMENTS,
    Spread,
    Statistic,
    Sums,
    estimated,
    reach,
)
from qaudit.types import Interval

POWER = 0.8
BOUND = 0.8
MOST = 10**7  # documents: beyond that no audit is feasible
MOST_TO_DECIDE = 4096
"""Documents: what takes more to decide is at its margin."""


def _with_documents(spread: Spread, documents: int) -> Spread:
    share = documents / spread.documents
    freedom = min(max(2.0, spread.freedom * share), max(2.0, documents - 1.0))
    return Spread(documents, spread.standard_error / math.sqrt(share), freedom, spread.skewness)


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
    return _smallest(
        lambda n: max(reach(_with_documents(spread, n), confidence)) <= target,
        MINIMUM_DOCUMENTS,
        MOST,
    )


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
