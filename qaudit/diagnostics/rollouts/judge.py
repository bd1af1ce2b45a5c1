"""What each stream makes of rollouts: how far it is from them, and where it would leave them.

The unit is the prompt: all samples behind it are summed, and intervals are over prompts. The KL
divergence of a sequence is the sum of those of its tokens, E_p[sum KL_t], which has far less noise
than that of log p / q. Along a greedy rollout the first token that is not a stream's own choice is
where its own generation would differ: nothing is generated for that. Along a sampled one that
place means nothing, and is not measured. Drawn answers that carry marks give the score to expect of
a stream by importance weights (`core/weighted.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.statistics import Array
from qaudit.core.weighted import expected_score
from qaudit.judge.table import Cell, Measurements
from qaudit.types import (
    FULL_PRECISION,
    Diagnostics,
    Finding,
    Interval,
    RolloutEvidence,
    RolloutRow,
)

Ints = npt.NDArray[np.signedinteger[Any]]

TURN, REASONING = "turn", "reasoning"


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the diagnostics with a row for each stream that scored rollouts, and no finding."""
    rows = (_row(table, cell) for cell in table.cells)
    return replace(diagnostics, rollouts=tuple(row for row in rows if row is not None)), ()


@dataclass(frozen=True, eq=False)
class _ByPrompt:
    """Samples summed by prompt."""

    place: Ints  # (S,) of each sample's prompt
    count: int

    @classmethod
    def of(cls, evidence: RolloutEvidence) -> _ByPrompt:
        prompts, place = np.unique(evidence.prompt, return_inverse=True)
        return cls(place, len(prompts))

    def sums(self, values: Array | Ints | None = None) -> Array:
        sums: Array = np.bincount(self.place, values, self.count).astype(np.float64)
        return sums


def _row(table: Measurements, cell: Cell) -> RolloutRow | None:
    measured = table.draws(*cell)[0]
    evidence = measured.evidence.rollouts
    if evidence is None:
        return None
    by_prompt, level = _ByPrompt.of(evidence), table.confidence
    tokens, samples = by_prompt.sums(evidence.tokens), by_prompt.sums()
    kl = None if evidence.kl_sum is None else by_prompt.sums(evidence.kl_sum)
    full = table.full(cell[0]) if cell[1] != FULL_PRECISION else None
    return RolloutRow(
        subject=cell[0],
        scheme=cell[1],
        spec=measured.spec,
        prompts=by_prompt.count,
        samples=len(evidence.prompt),
        tokens=int(evidence.tokens.sum()),
        ce=_ratio(by_prompt.sums(evidence.nll_sum), tokens, level),
        kl=None if kl is None else _ratio(kl, tokens, level),
        sequence_kl=None if kl is None else _ratio(kl, samples, level),
        **_divergence(evidence, level),
        **_ends(evidence, full.evidence.rollouts if full else None, by_prompt, level),
        **_score(evidence, full.evidence.rollouts if full else evidence, table, cell),
    )


def _ratio(sums: Array, counts: Array, confidence: float) -> Interval:
    return statistics.interval((sums, counts), statistics.per_token, confidence)


def _divergence(evidence: RolloutEvidence, confidence: float) -> dict[str, Any]:
    """Return the median of tokens to divergence, and the share of prompts without; greedy only."""
    greedy = np.flatnonzero(evidence.agreed >= 0)
    _, first = np.unique(evidence.prompt[greedy], return_index=True)
    chosen = greedy[first]
    if not len(chosen):
        return {"tokens_to_divergence": None, "never_diverges": None}
    never = evidence.agreed[chosen] == evidence.tokens[chosen]
    # A token's place counts from 1: the first token that differs is the fifth behind 4 that agree.
    places = np.where(never, np.inf, evidence.agreed[chosen] + 1.0)
    median = statistics.median(places, confidence)
    return {
        "tokens_to_divergence": statistics.within(median, 1.0, np.inf)
        if np.isfinite(median.estimate)
        else None,
        "never_diverges": statistics.accuracy(never, confidence),
    }


def _ends(
    evidence: RolloutEvidence,
    full: RolloutEvidence | None,
    by_prompt: _ByPrompt,
    confidence: float,
) -> dict[str, Any]:
    """Return how much more probable than in full precision it is to end."""

    def more(name: str) -> Interval | None:
        if full is None or name not in evidence.end_names or full.sha256 != evidence.sha256:
            return None
        group = evidence.end_names.index(name)
        sums = (by_prompt.sums(part.end_sum[:, group]) for part in (evidence, full))
        result = statistics.interval(tuple(sums), statistics.excess, confidence)
        return statistics.within(result, -1.0, np.inf)  # no probability is below 0

    return {"end_of_turn": more(TURN), "end_of_reasoning": more(REASONING)}


def _score(
    evidence: RolloutEvidence, full: RolloutEvidence | None, table: Measurements, cell: Cell
) -> dict[str, Any]:
    """Return what a stream's answers are expected to score, or why that is not said."""
    if evidence.mark is None:
        return {}
    contents = {subject.label: subject.content for subject in table.subjects}
    if evidence.drawn_sum is None or full is None or full.drawn_sum is None:
        return {"unweighed": evidence.unweighed or "full precision was not measured"}
    if evidence.weights_sha256 != contents[cell[0]]:
        return {"unweighed": f"they are answers of other weights than those of `{cell[0]}`"}
    marked = ~np.isnan(evidence.mark)
    log_weights = evidence.drawn_sum[marked] - full.drawn_sum[marked]
    result = expected_score(
        evidence.mark[marked], log_weights, evidence.prompt[marked], table.confidence
    )
    is_full = evidence is full
    return {
        "expected_score": result.score,
        "expected_change": None if is_full else result.change,
        "effective_samples": result.effective,
        "unweighed": result.reason,
    }
