"""Power first: how many documents would find a difference of a given size, from a pilot.

A comparison finds a difference when its interval leaves out zero. The pilot says how far
documents and draws scatter it; with n documents in place of the pilot's n0 the part of the
documents shrinks by sqrt(n0 / n) and that of the draws stays. The power is

    E[ normal((effect - reach) / standard error) ],

over how far the interval of such a comparison will reach: with few draws that is itself a
matter of luck, so the mean is taken over the distribution of their scatter (chi). Asked for is
the smallest n whose power is enough. Where the draws alone scatter too far no number of
documents will do, and the answer is None: draw calibration more often.

A pilot of few draws knows their scatter badly. Its upper bound is taken, that 80 % of pilots
stay below; where draws scatter as much as documents, one pilot in five still promises too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from qaudit.core.draws import pooled
from qaudit.core.statistics import MINIMUM_DOCUMENTS, Statistic, Sums

POWER = 0.8
BOUND = 0.8
MOST = 10**7  # documents: beyond that nobody measures
LUCK = (np.arange(64) + 0.5) / 64  # quantiles over which the scatter's luck is averaged


@dataclass(frozen=True)
class Pilot:
    """What a pilot tells of the noise to come."""

    documents: int
    draws: int
    of_documents: float  # standard error with so many documents
    of_draws: float  # that so many draws bring whatever the documents, at its upper bound
    of_both: float  # that draws bring by treating so many documents differently

    @classmethod
    def of(cls, draws: Sequence[tuple[Sums, ...]], statistic: Statistic) -> Pilot:
        """Read a pilot: each draw's columns, on the same documents."""
        found, count = pooled(draws, statistic), len(draws)
        documents = len(np.asarray(draws[0][0]))
        if found.draw is None:
            return cls(documents, count, found.documents, 0.0, 0.0)
        freedom, both = count - 1, found.together or 0.0
        upper = found.draw**2 * freedom / float(special.chdtri(freedom, BOUND))
        alone = math.sqrt(max(0.0, upper - both**2) / count)
        return cls(documents, count, found.documents, alone, both / math.sqrt(count))

    def power(self, effect: float, documents: int, confidence: float) -> float:
        """Return how often so many documents would find an effect."""
        fewer = math.sqrt(self.documents / documents)
        error, draws = self.of_documents * fewer, math.hypot(self.of_draws, self.of_both * fewer)
        total = math.hypot(error, draws)
        if not math.isfinite(total) or total == 0.0:
            return float(total == 0.0 and effect > 0)
        tail = 0.5 + confidence / 2
        reach = error * float(special.stdtrit(documents - 1, tail)) * (1 + 1 / documents)
        if self.draws > 1:
            freedom = self.draws - 1
            scatter = draws * np.sqrt(special.chdtri(freedom, LUCK) / freedom)
            reach = np.hypot(reach, scatter * float(special.stdtrit(freedom, tail)))
        return float(np.mean(special.ndtr((effect - reach) / total)))


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
    unit = math.hypot(pilot.of_documents, pilot.of_draws, pilot.of_both) / 1000
    if not math.isfinite(unit) or unit == 0.0:
        return unit
    steps = _smallest(
        lambda k: pilot.power(k * unit, pilot.documents, confidence) >= power, 1, 10**6
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
