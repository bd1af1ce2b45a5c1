"""Several draws of calibration text: how much of an interval is documents, how much the draw.

Another calibration text is another quantized model, so that one draw measures how good that model
is and not how good the scheme is. With R draws, measured on the same documents,

    half width^2 = (documents: that of the mean over draws)^2 + (draws: t s / sqrt(R))^2,

each part with a quantile of its own, t with R - 1 degrees of freedom (the method of variance
estimates recovery, Zou and Donner 2008). One pooled quantile with Satterthwaite's degrees of
freedom covers 89 % where 95 were promised, when two draws agree by luck. With two draws the
part of the draw rests on one difference, and the interval says so by being wide. The mean over
draws carries 1/R of what draws and documents do together, so that part is counted twice: too
wide by little, never too narrow. s is what one draw moves the result by, whatever R is.

Power first: how many documents would find a difference of a given size, from a pilot. A
comparison finds a difference when its interval leaves out zero. The pilot says how far
documents and draws scatter it; with n documents in place of the pilot's n0 the part of the
documents shrinks by sqrt(n0 / n) and that of the draws stays. The power is

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

Shapes: R draws, K sums, D documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from qaudit.core.statistics import (
    MINIMUM_DOCUMENTS,
    UNKNOWN,
    Array,
    Spread,
    Statistic,
    Sums,
    influences,
    interval,
    reach,
    spread_of,
)
from qaudit.types import Interval

POWER = 0.8
BOUND = 0.8
MOST = 10**7  # documents: beyond that no audit is feasible
LUCK = (np.arange(64) + 0.5) / 64  # quantiles over which the scatter's luck is averaged


@dataclass(frozen=True)
class Pooled:
    """A statistic over several draws, and what its uncertainty is made of, as standard errors."""

    interval: Interval
    draws: int
    documents: float  # of the mean over draws
    draw: float | None  # of a single draw; None where there is only one
    together: float | None = None  # the part of `draw` that more documents would lessen
    spread: Spread | None = None  # of documents; None where it is unknown

    @property
    def share_of_documents(self) -> float | None:
        """Return the part of the variance that more documents would lessen."""
        if self.draw is None:
            return None
        of_draws = self.draw**2 / self.draws
        total = self.documents**2 + of_draws
        return self.documents**2 / total if total > 0 else None


def pooled(
    draws: Sequence[tuple[Sums, ...]], statistic: Statistic, confidence: float = 0.95
) -> Pooled:
    """Return the statistic of the draws' mean sums; every draw has the same columns."""
    columns_RKD = np.array([[np.asarray(c, dtype=np.float64) for c in draw] for draw in draws])
    mean = tuple(columns_RKD.mean(axis=0))
    estimate, influence_D = influences(mean, statistic)
    if not math.isfinite(estimate):
        return Pooled(UNKNOWN, len(draws), math.inf, None)
    if influence_D is None:
        return Pooled(Interval(estimate, -math.inf, math.inf), len(draws), math.inf, None)
    spread = spread_of(influence_D)
    if len(draws) == 1:
        whole = interval(draws[0], statistic, confidence)
        return Pooled(whole, 1, spread.standard_error, None, None, spread)
    each = [influences(draw, statistic) for draw in draws]
    between = float(np.std([estimate for estimate, _ in each], ddof=1))
    below, above = reach(spread, confidence)
    quantile = float(special.stdtrit(len(draws) - 1, 0.5 + confidence / 2))
    of_draws = quantile * between / math.sqrt(len(draws))
    # Each part keeps its own quantile, so that squared widths add and not variances.
    low, high = math.hypot(below, of_draws), math.hypot(above, of_draws)
    whole = Interval(estimate, estimate - low, estimate + high)
    together = _together(each)
    return Pooled(whole, len(draws), spread.standard_error, between, together, spread)


def _together(each: Sequence[tuple[float, Array | None]]) -> float | None:
    """Return what draws differ by because they treat documents differently.

    That is the scatter of documents' influences between draws; it passes for a difference of
    draws, and a text of twice as many documents would halve its square.
    """
    known = [influence_D for _, influence_D in each if influence_D is not None]
    if len(known) < len(each):
        return None
    influence_RD = np.stack(known)
    draws, documents = influence_RD.shape
    apart_RD = influence_RD - influence_RD.mean(axis=0)
    return math.sqrt(float((apart_RD**2).sum()) / ((draws - 1) * documents * (documents - 1)))


def over_repetitions(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Return the mean of independent repetitions with Student's t interval; None for one alone.

    With few of them, as seeds of a training run are, the quantile is large (4.3 for three, at
    95 %), and that is the honest price of few. Bootstrap and normal intervals are given up: with
    three numbers the first has ten distinct samples, and the second covers 81 %.
    """
    if len(values) < 2:
        return None
    numbers = np.asarray(values, dtype=np.float64)
    mean, n = float(numbers.mean()), len(numbers)
    quantile = float(special.stdtrit(n - 1, 0.5 + confidence / 2))
    half = quantile * float(numbers.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


# ------------------------------------------------------------------------------------- power


@dataclass(frozen=True)
class Pilot:
    """Upper bounds of the noise, from a pilot."""

    spread: Spread  # of as many documents as the pilot had
    draws: int
    of_draws: float  # standard error that so many draws bring whatever the documents
    of_both: float  # that they bring by treating the pilot's documents differently

    @classmethod
    def of(cls, draws: Sequence[tuple[Sums, ...]], statistic: Statistic) -> Pilot:
        """Read a pilot: each draw's columns, on the same documents."""
        result, count = pooled(draws, statistic), len(draws)
        known = result.spread or Spread(len(np.asarray(draws[0][0])), math.inf, 2.0, 0.0)
        spread = replace(known, standard_error=_upper(known.standard_error, known.freedom))
        if result.draw is None:
            return cls(spread, count, 0.0, 0.0)
        both = result.together or 0.0
        alone = math.sqrt(max(0.0, _upper(result.draw, count - 1) ** 2 - both**2) / count)
        return cls(spread, count, alone, both / math.sqrt(count))

    def power(self, effect: float, documents: int, confidence: float) -> float:
        """Return how often so many documents would find an effect."""
        spread = _with_documents(self.spread, documents)
        fewer = math.sqrt(self.spread.documents / documents)
        draws = math.hypot(self.of_draws, self.of_both * fewer)
        total = math.hypot(spread.standard_error, draws)
        if not math.isfinite(total) or total == 0.0:
            return float(total == 0.0 and effect > 0)
        reached = max(reach(spread, confidence))
        if self.draws > 1:
            freedom = self.draws - 1
            quantile = float(special.stdtrit(freedom, 0.5 + confidence / 2))
            scatter = draws * np.sqrt(special.chdtri(freedom, LUCK) / freedom)
            reached = np.hypot(reached, scatter * quantile)
        return float(np.mean(special.ndtr((effect - reached) / total)))


def _upper(error: float, freedom: float) -> float:
    """Return what a standard error stays below, for `BOUND` of all pilots."""
    return error * math.sqrt(freedom / float(special.chdtri(freedom, BOUND)))


def _with_documents(spread: Spread, documents: int) -> Spread:
    """Return the spread that more documents of the same kind would make, or fewer."""
    share = documents / spread.documents
    freedom = min(max(2.0, spread.freedom * share), max(2.0, documents - 1.0))
    return Spread(documents, spread.standard_error / math.sqrt(share), freedom, spread.skewness)


def documents_to_detect(
    draws: Sequence[tuple[Sums, ...]],
    statistic: Statistic,
    effect: float,
    confidence: float = 0.95,
    power: float = POWER,
) -> int | None:
    """Return how many documents find an effect with this power, judged by a pilot's draws."""
    pilot = Pilot.of(draws, statistic)
    return _smallest(lambda n: pilot.power(effect, n, confidence) >= power, MINIMUM_DOCUMENTS, MOST)


def detectable(
    draws: Sequence[tuple[Sums, ...]],
    statistic: Statistic,
    confidence: float = 0.95,
    power: float = POWER,
) -> float:
    """Return the smallest effect that as many documents and draws as these find."""
    pilot = Pilot.of(draws, statistic)
    unit = math.hypot(pilot.spread.standard_error, pilot.of_draws, pilot.of_both) / 1000
    if not math.isfinite(unit) or unit == 0.0:
        return unit
    steps = _smallest(
        lambda k: pilot.power(k * unit, pilot.spread.documents, confidence) >= power, 1, 10**6
    )
    return math.inf if steps is None else steps * unit


def _smallest(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the smallest number that is enough, where more is never worse."""
    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
