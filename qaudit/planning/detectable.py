"""How small a relative error the text of an audit can tell from none.

That depends on how much the damage differs between documents, which is unknown before anything is
measured. Told is the difference from zero that an audit like this one, with as many draws of
calibration text, finds in four of five cases; the median over its subjects and schemes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np

from qaudit.core.power import detectable
from qaudit.core.statistics import excess
from qaudit.types import FULL_PRECISION, Measurement, Plan


def detectable_error(plan: Plan, measurements: Sequence[Measurement]) -> float | None:
    """Return the relative error that a typical comparison of the audit detects."""
    labels = {subject.label for subject in plan.subjects}
    effects = list(_effects([m for m in measurements if m.subject in labels], plan))
    return median(effects) if effects else None


def _effects(measurements: Sequence[Measurement], plan: Plan) -> Iterator[float]:
    """Yield the effect that the documents and draws of each subject and scheme detect."""
    full = {
        (m.subject, m.evidence.document_sha256): m for m in measurements if m.spec == FULL_PRECISION
    }
    draws: dict[tuple[str, str, tuple[str, ...]], dict[int, Measurement]] = {}
    for m in measurements:
        documents = m.evidence.document_sha256
        few = len(documents) <= plan.recipe.evaluation_documents
        if m.spec in plan.specs and (m.subject, documents) in full and few:
            draws.setdefault((m.subject, m.spec, documents), {})[m.calibration_seed] = m
    for (subject, _, documents), by_seed in draws.items():
        beside = full[subject, documents].evidence
        scored = beside.tokens > 0
        drawn = np.stack([m.evidence.nll_sum[scored] for m in by_seed.values()])
        pilot = drawn, beside.nll_sum[scored]
        effect = detectable(pilot, excess, plan.recipe.confidence)
        if math.isfinite(effect):
            yield effect
