"""What a policy asks of rollouts: where greedy answers change, and when answers end.

The unit is the prompt.
"""

from __future__ import annotations

import numpy as np

from qaudit.core import statistics
from qaudit.core.statistics import Array
from qaudit.types import Interval, RolloutEvidence

TURN, REASONING = "turn", "reasoning"


def places_of_divergence(evidence: RolloutEvidence) -> Array:
    """Return the first token of each prompt's greedy rollout that is another, counted from 1.

    Infinite where the stream writes the whole rollout; nothing where all are sampled.
    """
    greedy = np.flatnonzero(evidence.agreed >= 0)
    _, first = np.unique(evidence.prompt[greedy], return_index=True)
    agreed = evidence.agreed[greedy[first]]
    places: Array = np.where(agreed == evidence.tokens[greedy[first]], np.inf, agreed + 1.0)
    return places


def tokens_to_divergence(
    evidence: RolloutEvidence, full: RolloutEvidence, confidence: float
) -> Interval | None:
    """Return the median place; infinite where most rollouts never diverge."""
    places = places_of_divergence(evidence)
    if not len(places):
        return None
    return statistics.within(statistics.median(places, confidence), 1.0, np.inf)


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


def change_of_end(
    evidence: RolloutEvidence, full: RolloutEvidence, name: str, confidence: float
) -> Interval | None:
    """Return by how much the probability of ending something changes, as a part of it."""
    if name not in evidence.end_names or full.sha256 != evidence.sha256:
        return None
    group = evidence.end_names.index(name)
    _, place_S = np.unique(evidence.prompt, return_inverse=True)
    sums = (np.bincount(place_S, part.end_sum[:, group]) for part in (evidence, full))
    interval = statistics.interval(tuple(sums), statistics.excess, confidence)
    return statistics.within(interval, -1.0, np.inf)  # no probability is below 0


QUANTITIES = {"tokens_to_divergence": tokens_to_divergence, "answer_length": answer_length}
"""The metrics of rollouts, by the name of their statistic."""
