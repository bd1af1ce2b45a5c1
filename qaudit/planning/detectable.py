"""How small a relative error the text of an audit can tell from none.

That depends on how much the damage differs between documents, which is unknown before anything is
measured. Told is the difference from zero that an audit like this one finds
in four of five cases; the median over its subjects and schemes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from qaudit.core.power import detectable
from qaudit.core.statistics import excess
from qaudit.types import FULL_PRECISION, Measurement, Plan


def detectable_error(plan: Plan, measurements: Sequence[Measurement]) -> float | None:
    """Return the relative error that a typical comparison of the audit detects."""
    labels = {subject.label for subject in plan.subjects}
    effects = list(_effects([m for m in measurements if m.subject in labels], plan))
    return median(effects) if effects else None


def _effects(measurements: Sequence[Measurement], plan: Plan) -> Iterator[float]:
    """Yield the effect that the documents of each subject and scheme detect."""
    full = {
        (m.subject, m.evidence.document_sha256): m for m in measurements if m.spec == FULL_PRECISION
    }
    for m in measurements:
        documents = m.evidence.document_sha256
        beside = full.get((m.subject, documents))
        few = len(documents) <= plan.recipe.evaluation_documents
        if m.spec not in plan.specs or beside is None or not few:
            continue
        scored = m.evidence.tokens > 0
        pair = (m.evidence.nll_sum[scored], beside.evidence.nll_sum[scored])
        effect = detectable(pair, excess, plan.recipe.confidence)
        if math.isfinite(effect):
            yield effect
