"""Two models on the same items: how many answers flipped, and how sure a change of accuracy is.

Items are right or wrong under both, so what counts are the flips: accuracy may stand still while
a tenth of the answers change. Of n items, b went from right to wrong and c back:

    drop            (b - c) / n           a paired interval, half an item more in each cell
    flips           (b + c) / n           Dutta et al. 2024
    p-value         McNemar's test, mid-p: exact binomial on b + c, half of what equals it
    margin factor   the margin of the option that full precision picks, quantized over full

A mean over tasks weighs each task alike; tasks are independent.

**What a quantized model would score**, by answers that full precision wrote.

Answers y were drawn from p; those of q would score E_q[f] = E_p[w f], with w = q(y) / p(y) over the
tokens that the mark f reads. The estimate is self-normalized: sum(w f) / sum(w). Its interval is
clustered by prompt, and so is that of its change against the plain mean, which is paired.

Where q is far from p, few answers carry all of the weight: the estimate is wrong, and its interval
does not show it. So nothing is said below an effective sample size, (sum w)^2 / sum(w^2), of 100 or
of a tenth of the samples. Weights average 1 where all that q writes was within reach of p; where
they are below it by more than chance, as where the sampler cuts tokens off that q takes, nothing is
said either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy  # its parts load where they are first used

from qaudit.core import statistics
from qaudit.core.statistics import Array
from qaudit.types import Interval

Marks = npt.NDArray[np.bool_]

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
    below = scipy.special.bdtr(low - 1, discordant, 0.5) if low else 0.0
    return float(min(1.0, below + scipy.special.bdtr(low, discordant, 0.5)))


def margin_factor(ratio_N: Array, confidence: float) -> Interval | None:
    ratio_N = ratio_N[np.isfinite(ratio_N)]
    if len(ratio_N) < 6:  # below six, the least and the largest do not hold the median at 95 %
        return None
    ranked = statistics.median(ratio_N, confidence)
    least, largest = float(ratio_N.min()), float(ratio_N.max())
    low, high = max(ranked.low, least), min(ranked.high, largest)
    return Interval(float(np.median(ratio_N)), low, high)


LEAST_SIZE, LEAST_SHARE = 100.0, 0.1
LEAST_PROMPTS = 10
_CERTAIN = 0.99


@dataclass(frozen=True)
class ExpectedScore:
    """An expected score, or the reason why there is none."""

    samples: int
    effective: float  # sample size
    score: Interval | None = None
    change: Interval | None = None  # against the score of full precision, on the same answers
    reason: str = ""


def expected_score(
    score_N: Array, log_weight_N: Array, prompt_N: npt.NDArray[np.int64], confidence: float = 0.95
) -> ExpectedScore:
    """Return what answers score under weights, with intervals over prompts."""
    count = len(score_N)
    effective = effective_size(log_weight_N)
    if reason := _refusal(log_weight_N, prompt_N, effective):
        return ExpectedScore(count, effective, reason=reason)
    weight_N = np.exp(log_weight_N)
    prompts, place_N = np.unique(prompt_N, return_inverse=True)

    def by_prompt(value_N: Array) -> Array:
        return np.bincount(place_N, value_N, len(prompts)).astype(np.float64)

    weighted_D, weights_D = by_prompt(weight_N * score_N), by_prompt(weight_N)
    plain_D, samples_D = by_prompt(score_N), by_prompt(np.ones(count))
    mean = statistics.interval((weights_D, samples_D), statistics.per_token, _CERTAIN)
    if mean.high < 1:
        reason = (
            f"weights average {mean.estimate:.2f}: the scheme writes what full precision under "
            "this sampler does not"
        )
        return ExpectedScore(count, effective, reason=reason)
    sums = (weighted_D, weights_D, plain_D, samples_D)
    return ExpectedScore(
        count,
        effective,
        statistics.interval(sums[:2], statistics.per_token, confidence),
        statistics.interval(sums, statistics.excess_difference, confidence),
    )


def effective_size(log_weight_N: Array) -> float:
    """Return how many unweighted answers are worth as much; 0 where nothing has weight."""
    if not len(log_weight_N) or not np.isfinite(log_weight_N.max()):
        return 0.0
    weight_N = np.exp(log_weight_N - log_weight_N.max())
    return float(weight_N.sum() ** 2 / (weight_N**2).sum())


def _refusal(log_weight_N: Array, prompt_N: npt.NDArray[np.int64], effective: float) -> str:
    count = len(log_weight_N)
    if not count:
        return "no sampled rollout has a mark"
    if np.isnan(log_weight_N).any() or (log_weight_N == np.inf).any():
        return "probabilities are not finite"
    if (prompts := len(np.unique(prompt_N))) < LEAST_PROMPTS:
        return f"{prompts} prompts are fewer than {LEAST_PROMPTS}"
    if effective < LEAST_SIZE or effective < LEAST_SHARE * count:
        least = max(LEAST_SIZE, LEAST_SHARE * count)
        return (
            f"the effective sample size is {effective:.0f} of {count}, below {least:.0f}: generate"
        )
    return ""
