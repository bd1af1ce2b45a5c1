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

Shapes: R draws, K sums, D documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from qaudit.core.statistics import (
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
        found = interval(draws[0], statistic, confidence)
        return Pooled(found, 1, spread.standard_error, None, None, spread)
    each = [influences(draw, statistic) for draw in draws]
    between = float(np.std([estimate for estimate, _ in each], ddof=1))
    below, above = reach(spread, confidence)
    quantile = float(special.stdtrit(len(draws) - 1, 0.5 + confidence / 2))
    of_draws = quantile * between / math.sqrt(len(draws))
    low, high = math.hypot(below, of_draws), math.hypot(above, of_draws)
    found = Interval(estimate, estimate - low, estimate + high)
    together = _together(each)
    return Pooled(found, len(draws), spread.standard_error, between, together, spread)


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
