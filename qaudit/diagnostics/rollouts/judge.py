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
from qaudit.judge.rollouts import (
    REASONING,
    TURN,
    change_of_end,
    places_of_divergence,
    tokens_to_divergence,
    weighed,
)
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
    of_full = full.evidence.rollouts if full else None
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
        end_of_turn=change_of_end(evidence, of_full, TURN, level),
        end_of_reasoning=change_of_end(evidence, of_full, REASONING, level),
        **_score(evidence, of_full if full else evidence, table, cell),
    )


def _ratio(sums: Array, counts: Array, confidence: float) -> Interval:
    return statistics.interval((sums, counts), statistics.per_token, confidence)


def _divergence(evidence: RolloutEvidence, confidence: float) -> dict[str, Any]:
    """Return the median of tokens to divergence, and the share of prompts without; greedy only."""
    places, median = places_of_divergence(evidence), tokens_to_divergence(evidence, confidence)
    if median is None:
        return {"tokens_to_divergence": None, "never_diverges": None}
    return {
        "tokens_to_divergence": median if np.isfinite(median.estimate) else None,
        "never_diverges": statistics.accuracy(np.isinf(places), confidence),
    }


def _score(
    evidence: RolloutEvidence, full: RolloutEvidence | None, table: Measurements, cell: Cell
) -> dict[str, Any]:
    """Return what a stream's answers are expected to score, or why that is not said."""
    if evidence.mark is None:
        return {}
    subjects = {subject.label: subject for subject in table.subjects}
    result = weighed(evidence, full, subjects[cell[0]], table.confidence)
    if isinstance(result, str):
        return {"unweighed": result}
    return {
        "expected_score": result.score,
        "expected_change": None if evidence is full else result.change,
        "effective_samples": result.effective,
        "unweighed": result.reason,
    }
