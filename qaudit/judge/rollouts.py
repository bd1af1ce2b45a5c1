"""Quantities of rollouts: where greedy answers change, when answers end, and what they would score.

The unit is the prompt. A quantity that is not measured is None, or the reason why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.items import ExpectedScore, expected_score
from qaudit.core.statistics import Array
from qaudit.types import Interval, RolloutEvidence, Subject

TURN, REASONING = "turn", "reasoning"
_CERTAIN, _SLIGHT = 0.999, 0.01  # a part of the entropy, which arithmetic alone may move


def places_of_divergence(evidence: RolloutEvidence) -> Array:
    """Return the first token of each prompt's greedy rollout that is another, counted from 1.

    Infinite where the stream writes the whole rollout; nothing where all are sampled.
    """
    greedy = np.flatnonzero(evidence.agreed >= 0)
    _, first = np.unique(evidence.prompt[greedy], return_index=True)
    agreed = evidence.agreed[greedy[first]]
    places: Array = np.where(agreed == evidence.tokens[greedy[first]], np.inf, agreed + 1.0)
    return places


def tokens_to_divergence(evidence: RolloutEvidence, confidence: float) -> Interval | None:
    """Return the median place; infinite where most rollouts never diverge."""
    places = places_of_divergence(evidence)
    if not len(places):
        return None
    return statistics.within(statistics.median(places, confidence), 1.0, np.inf)


def change_of_end(
    evidence: RolloutEvidence, full: RolloutEvidence | None, name: str, confidence: float
) -> Interval | None:
    if full is None or name not in evidence.end_names or full.sha256 != evidence.sha256:
        return None
    group = evidence.end_names.index(name)
    _, place_S = np.unique(evidence.prompt, return_inverse=True)
    sums = (np.bincount(place_S, part.end_sum[:, group]) for part in (evidence, full))
    interval = statistics.interval(tuple(sums), statistics.excess, confidence)
    return statistics.within(interval, -1.0, np.inf)  # no probability is below 0


def answer_length(
    evidence: RolloutEvidence, full: RolloutEvidence, confidence: float
) -> Interval | None:
    """Return by how much the probability of ending a turn changes, up or down."""
    change = change_of_end(evidence, full, TURN, confidence)
    if change is None:
        return None
    bounds = sorted((abs(change.low), abs(change.high)))
    low = 0.0 if change.low <= 0 <= change.high else bounds[0]
    return Interval(abs(change.estimate), low, bounds[1])


def weighed(
    evidence: RolloutEvidence, full: RolloutEvidence | None, subject: Subject, confidence: float
) -> ExpectedScore | str:
    """Return what a stream's answers would score, or why that is not said."""
    if evidence.mark is None:
        return "no rollout has a mark"
    if evidence.drawn_sum is None or full is None or full.drawn_sum is None:
        return evidence.unweighed or "full precision was not measured"
    if evidence.weights_sha256 != subject.content:
        return f"they are answers of other weights than those of `{subject.label}`"
    marked = ~np.isnan(evidence.mark)
    if reason := _written_by_others(full, marked):
        return reason
    log_weights = evidence.drawn_sum[marked] - full.drawn_sum[marked]
    return expected_score(evidence.mark[marked], log_weights, evidence.prompt[marked], confidence)


def _written_by_others(full: RolloutEvidence, marked: npt.NDArray[np.bool_]) -> str:
    """Return why full precision cannot have drawn these answers, or ''.

    The hash of a folder tells whose weights were meant; a server may hold others. What was drawn
    from a distribution surprises it, -log p, by its entropy on average, token for token.
    """
    if full.drawn_sum is None or full.entropy_sum is None:
        return ""  # measured before it was recorded
    _, place_S = np.unique(full.prompt[marked], return_inverse=True)
    surprise_D = np.bincount(place_S, -full.drawn_sum[marked])
    entropy_D = np.bincount(place_S, full.entropy_sum[marked])
    change = statistics.interval((surprise_D, entropy_D), statistics.excess, _CERTAIN)
    if abs(change.estimate) <= _SLIGHT or change.low <= 0 <= change.high:
        return ""
    more = "more" if change.estimate > 0 else "less"
    return (
        f"full precision would be surprised {abs(change.estimate):.0%} {more} by these answers "
        "than by its own: other weights wrote them, or another sampler"
    )


Quantity = Callable[[RolloutEvidence, RolloutEvidence, Subject, float], Interval | str]
"""Of a stream and of full precision of a subject, at a confidence."""


def _drop(
    evidence: RolloutEvidence, full: RolloutEvidence, subject: Subject, confidence: float
) -> Interval | str:
    result = weighed(evidence, full, subject, confidence)
    if isinstance(result, str) or (change := result.change) is None:
        return result if isinstance(result, str) else result.reason
    return Interval(-change.estimate, -change.high, -change.low)


QUANTITIES: Mapping[str, Quantity] = {
    "tokens_to_divergence": lambda evidence, full, subject, confidence: (
        tokens_to_divergence(evidence, confidence) or "the rollouts are sampled, none is greedy"
    ),
    "answer_length": lambda evidence, full, subject, confidence: (
        answer_length(evidence, full, confidence) or "no token is known to end a turn"
    ),
    "expected_drop": _drop,
}
"""The metrics of rollouts, by the name of their statistic."""
