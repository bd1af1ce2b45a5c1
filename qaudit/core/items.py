"""Two models on the same items: how many answers flipped, and how sure a change of accuracy is.

Items are right or wrong under both, so what counts are the flips: accuracy may stand still while
a tenth of the answers change. Of n items, b went from right to wrong and c back:

    drop            (b - c) / n           a paired interval, half an item more in each cell
    flips           (b + c) / n           Dutta et al. 2024
    p-value         McNemar's test, mid-p: exact binomial on b + c, half of what equals it
    margin factor   the margin of the option that full precision picks, quantized over full

A mean over tasks weighs each task alike; tasks are independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy  # its parts load where they are first used

from qaudit.core import statistics
from qaudit.types import Interval

Marks = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.float64]

_CELLS = np.array([[0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0]])
_HALF = 0.5
"""Of an item, added to each of the four cells (Agresti and Min 2005): no flip among n items is
not certainty."""


@dataclass(frozen=True, eq=False)
class Marked:
    """The items of one task under a scheme and in full precision."""

    right_N: Marks
    full_N: Marks

    @property
    def lost(self) -> int:
        return int((self.full_N & ~self.right_N).sum())

    @property
    def won(self) -> int:
        return int((self.right_N & ~self.full_N).sum())


def mean_accuracy(rights: Sequence[Marks], confidence: float) -> Interval:
    """Return the unweighted mean accuracy of tasks; each has half an item more right and wrong."""
    shares = [float(right_N.mean()) for right_N in rights]
    variance = 0.0
    for right_N in rights:
        count = len(right_N) + 2 * _HALF
        share = (float(right_N.sum()) + _HALF) / count
        variance += share * (1 - share) / count
    estimate = sum(shares) / len(shares)
    half = float(scipy.special.ndtri(0.5 + confidence / 2)) * math.sqrt(variance) / len(shares)
    return Interval(estimate, max(0.0, estimate - half), min(1.0, estimate + half))


def drop(tasks: Sequence[Marked], confidence: float, *, normalized: bool) -> Interval | None:
    """Return Acc(full) - Acc(quantized), the mean over tasks, with a paired interval.

    Normalized, it is divided by what full precision gets wrong; None where that is nothing.
    """
    lost = [task.full_N.astype(float) - task.right_N for task in tasks]
    errors = [1 - task.full_N.astype(float) for task in tasks]
    below = sum(float(left_N.mean()) for left_N in errors) if normalized else float(len(tasks))
    if below == 0:
        return None
    estimate = sum(float(lost_N.mean()) for lost_N in lost) / below
    above, under = 0.0, 0.0
    rows = []
    for task in tasks:
        value_2M = np.concatenate([np.stack([task.right_N, task.full_N]).astype(float), _CELLS], 1)
        weight_M = np.concatenate([np.ones(len(task.full_N)), np.full(4, _HALF)])
        weight_M = weight_M / weight_M.sum()
        lost_M = value_2M[1] - value_2M[0]
        left_M = 1 - value_2M[1] if normalized else np.ones_like(lost_M)
        above, under = above + float(weight_M @ lost_M), under + float(weight_M @ left_M)
        rows.append((weight_M, lost_M, left_M, len(task.full_N) + 2))
    center = above / under
    variance = 0.0
    for weight_M, lost_M, left_M, count in rows:
        residual_M = lost_M - center * left_M
        mean = float(weight_M @ residual_M)
        variance += float(weight_M @ (residual_M - mean) ** 2) / count
    freedom = sum(len(task.full_N) for task in tasks) + 1
    half = float(scipy.special.stdtrit(freedom, 0.5 + confidence / 2)) * math.sqrt(variance) / under
    return Interval(estimate, min(estimate, center - half), max(estimate, center + half))


def error_increase(tasks: Sequence[Marked], confidence: float) -> Interval | None:
    """Return the drop as a part of what full precision gets wrong; None where that is nothing."""
    increase = drop(tasks, confidence, normalized=True)
    if increase is None and not any(task.lost for task in tasks):
        return Interval(0.0, 0.0, 0.0)
    return increase


def flips(tasks: Sequence[Marked], confidence: float) -> Interval:
    """Return the share of items that went from right to wrong or back, the mean over tasks."""
    flipped = [task.full_N != task.right_N for task in tasks]
    if len(flipped) == 1:
        return statistics.accuracy(flipped[0], confidence)
    return mean_accuracy(flipped, confidence)


def mcnemar(lost: int, won: int) -> float:
    discordant = lost + won
    if discordant == 0:
        return 1.0
    low = min(lost, won)
    below, at_most = (
        scipy.special.bdtr(k, discordant, 0.5) if k >= 0 else 0.0 for k in (low - 1, low)
    )
    return float(min(1.0, below + at_most))


def margin_factor(ratio_N: Scores, confidence: float) -> Interval | None:
    ratio_N = np.sort(ratio_N[np.isfinite(ratio_N)])
    count = len(ratio_N)
    if count < 6:  # below six, the least and the largest do not hold the median at 95 %
        return None
    chances = scipy.special.bdtr(np.arange(count + 1), count, 0.5)
    reach = int(np.searchsorted(chances, (1 - confidence) / 2))
    low, high = max(0, reach - 1), min(count - 1, count - reach)
    return Interval(float(np.median(ratio_N)), float(ratio_N[low]), float(ratio_N[high]))
