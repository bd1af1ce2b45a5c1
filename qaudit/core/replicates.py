"""One number from each of several independent repetitions: their mean and Student's interval.

Seeds of a training run are such repetitions. With few of them the quantile is large (4.3 for
three, at 95 %), and that is the honest price of few. Bootstrap and normal intervals are given
up: with three numbers the first has ten distinct samples, and the second covers 81 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from qaudit.types import Interval


def over_repetitions(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Return the mean with Student's t interval; None for a single number, which has none."""
    if len(values) < 2:
        return None
    numbers = np.asarray(values, dtype=np.float64)
    mean, n = float(numbers.mean()), len(numbers)
    quantile = float(special.stdtrit(n - 1, 0.5 + confidence / 2))
    half = quantile * float(numbers.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)
