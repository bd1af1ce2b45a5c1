"""What a quantized model would score, by answers that full precision wrote.

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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.types import Interval

Array = npt.NDArray[np.float64]

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
    mean = statistics.interval((weights_D, samples_D), lambda s: s[0] / s[1], _CERTAIN)
    if mean.high < 1:
        return ExpectedScore(
            count,
            effective,
            reason=f"weights average {mean.estimate:.2f}: the scheme writes what full precision "
            "under this sampler does not",
        )
    return ExpectedScore(
        count,
        effective,
        statistics.interval((weighted_D, weights_D), lambda s: s[0] / s[1], confidence),
        statistics.interval(
            (weighted_D, weights_D, plain_D, samples_D),
            lambda s: s[0] / s[1] - s[2] / s[3],
            confidence,
        ),
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
