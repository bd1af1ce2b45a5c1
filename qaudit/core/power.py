"""Documents that a comparison or an interval needs, by what a pilot shows of their scatter.

How many documents would find a difference of a given size? A comparison finds a difference when
its interval leaves out zero. A pilot says how far documents and draws scatter it; with n documents
in place of the pilot's n0 the part of the documents shrinks by sqrt(n0 / n) and that of the draws
stays. The power is

    E[ normal((effect - reach) / standard error) ],

over how far the interval of such a comparison will reach (`statistics.reach`, on its longer
side): with few draws that is itself a matter of luck, so the mean is taken over the distribution
of their scatter (chi). The result is the smallest n whose power is enough. Where the draws alone
scatter too far no number of documents will do, and the result is None: draw calibration more
often.

A pilot knows the scatter of documents with heavy tails badly, and that of few draws worse. Of
both the upper bound is taken that holds for 80 % of all pilots; with the estimates themselves,
pilots of 100 documents kept 71 % where they promised 80. Where draws scatter as much as
documents, one pilot in five still promises too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy  # its parts load where they are first used

from qaudit.core.draws import DrawNoise, Pooled, added_by_draws, pooled
from qaudit.core.statistics import MINIMUM_DOCUMENTS, Spread, Statistic, Sums, reach
from qaudit.types import Interval

POWER = 0.8
BOUND = 0.8
MOST = 10**7  # documents: beyond that no audit is feasible
MOST_TO_DECIDE = 4096
"""Documents: what takes more to decide is at its margin."""
LUCK = (np.arange(64) + 0.5) / 64  # quantiles over which the scatter's luck is averaged


@dataclass(frozen=True)
class Pilot:
    """Upper bounds of the noise, from a pilot."""

    spread: Spread  # of as many documents as the pilot had
    draws: DrawNoise | None  # of the statistic

    @classmethod
    def of(
        cls, columns: Sequence[Sums], statistic: Statistic, noises: Sequence[DrawNoise | None] = ()
    ) -> Pilot:
        result = pooled(columns, statistic, noises=noises)
        documents = np.atleast_2d(columns[0]).shape[1]
        measured = result.spread or Spread(documents, math.inf, 2.0, 0.0)
        spread = replace(measured, standard_error=_upper(measured.standard_error, measured.freedom))
        if result.draw is None:
            return cls(spread, None)
        upper = _upper(result.draw, result.freedom) ** 2
        both = min(result.together**2, upper)
        return cls(spread, DrawNoise(upper, both, result.freedom))

    def power(self, effect: float, documents: int, confidence: float) -> float:
        spread = _with_documents(self.spread, documents)
        reached, draws = np.full(1, max(reach(spread, confidence))), self._draws(documents)
        alone = 0.0
        if draws is not None:
            alone = draws.variance - draws.together
            luck = scipy.special.chdtri(draws.freedom, LUCK) / draws.freedom
            added = added_by_draws(draws, spread, confidence, luck)
            reached = np.hypot(reached, np.sqrt(added))
        total = math.hypot(spread.standard_error, math.sqrt(alone))
        if not math.isfinite(total) or total == 0.0:
            return float(total == 0.0 and effect > 0)
        return float(np.mean(scipy.special.ndtr((effect - reached) / total)))

    def _draws(self, documents: int) -> DrawNoise | None:
        if self.draws is None:
            return None
        together = self.draws.together * self.spread.documents / documents
        alone = self.draws.variance - self.draws.together
        return replace(self.draws, variance=alone + together, together=together)


def _upper(error: float, freedom: float) -> float:
    """Return an upper bound of a standard error, for `BOUND` of all pilots."""
    return error * math.sqrt(freedom / float(scipy.special.chdtri(freedom, BOUND)))


def _with_documents(spread: Spread, documents: int) -> Spread:
    share = documents / spread.documents
    freedom = min(max(2.0, spread.freedom * share), max(2.0, documents - 1.0))
    return Spread(documents, spread.standard_error / math.sqrt(share), freedom, spread.skewness)


def documents_to_detect(
    columns: Sequence[Sums],
    statistic: Statistic,
    effect: float,
    confidence: float = 0.95,
    noises: Sequence[DrawNoise | None] = (),
) -> int | None:
    """Return how many documents find an effect in `POWER` of all cases, judged by a pilot."""
    pilot = Pilot.of(columns, statistic, noises)
    return _smallest(lambda n: pilot.power(effect, n, confidence) >= POWER, MINIMUM_DOCUMENTS, MOST)


def documents_to_decide(
    result: Pooled, margin: float, confidence: float, more_draws: tuple[int, int] = (1, 1)
) -> int | None:
    """Return how many documents decide on which side of a margin a quantity is, with `POWER`.

    The true value is unknown: it is near the estimate, give or take the standard error, so that an
    estimate far from the margin may be so by luck. The chance is over both, the true value and
    what further documents add to those that were measured. None beyond `MOST_TO_DECIDE`: the
    quantity is at the margin. `more_draws` is the number of draws now and then.
    """
    spread = result.spread
    if spread is None or not math.isfinite(result.interval.estimate):
        return None
    distance = abs(result.interval.estimate - margin)
    now, then = more_draws
    alone = together = 0.0
    if result.draw is not None:
        together = min(result.together, result.draw) ** 2
        alone = result.draw**2 - together

    def is_enough(documents: int) -> bool:
        after = _with_documents(spread, documents)
        reached, moved = max(reach(after, confidence)), spread.standard_error**2
        moved -= after.standard_error**2
        if result.draw is not None:
            shared = together * spread.documents / documents * now / then
            noise = DrawNoise(alone * now / then + shared, shared, result.freedom + then - now)
            reached = math.hypot(
                reached, math.sqrt(float(added_by_draws(noise, after, confidence)))
            )
            moved += alone * (1 - now / then)
        if moved <= 0.0:
            return distance > reached
        error = math.sqrt(moved)
        chance = scipy.special.ndtr((distance - reached) / error)
        return bool(chance + scipy.special.ndtr((-distance - reached) / error) >= POWER)

    return _smallest(is_enough, max(MINIMUM_DOCUMENTS, spread.documents + 1), MOST_TO_DECIDE)


def documents_for_width(
    columns: Sequence[Sums], statistic: Statistic, share: float, confidence: float = 0.95
) -> int | None:
    """Return how many documents make an interval over documents reach so far, as a share.

    The reach is that of its longer side, the share one of the estimate. None where no feasible
    number does, as with an estimate of zero.
    """
    result = pooled(columns, statistic)
    target, spread = share * abs(result.interval.estimate), result.spread
    if spread is None or not 0.0 < target < math.inf:
        return None
    return _smallest(
        lambda n: max(reach(_with_documents(spread, n), confidence)) <= target,
        MINIMUM_DOCUMENTS,
        MOST,
    )


def detectable(
    columns: Sequence[Sums],
    statistic: Statistic,
    confidence: float = 0.95,
    noises: Sequence[DrawNoise | None] = (),
) -> float:
    pilot = Pilot.of(columns, statistic, noises)
    variance = pilot.draws.variance if pilot.draws else 0.0
    unit = math.hypot(pilot.spread.standard_error, math.sqrt(variance)) / 1000
    if not math.isfinite(unit) or unit == 0.0:
        return unit
    steps = _smallest(
        lambda k: pilot.power(k * unit, pilot.spread.documents, confidence) >= POWER, 1, 10**6
    )
    return math.inf if steps is None else steps * unit


def items_to_detect(
    interval: Interval, items: int, margin: float, confidence: float = 0.95, draw: float = 0.0
) -> int | None:
    """Return how many items find that a change of accuracy is not the margin.

    `interval` is over so many items, and as many more of the same tasks would narrow it with the
    square root of their number; `draw` is what it is widened by afterwards, which does not
    shrink. None where no feasible number does.
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
        return math.hypot(reach_there, draw) + power * reach_there / quantile <= effect

    return _smallest(enough, MINIMUM_DOCUMENTS, MOST)


def _smallest(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the smallest number that is enough, where more is never worse."""
    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
