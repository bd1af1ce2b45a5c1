"""How small a relative error the text of a plan can tell from none, by what was measured on it.

That depends on how much the damage differs between documents, which nobody knows before
anything is measured: the spread of another model on another text is no guide. So it is
computed from measurements of this very audit, where an earlier run left some, and is otherwise
not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from qaudit.core.statistics import relative_error
from qaudit.engine.results import measured_in
from qaudit.types import FULL_PRECISION, Measurement, Plan


def with_detectable(plan: Plan, evidence: Path) -> Plan:
    """Return the plan with the half-width of a typical interval, if measurements are there."""
    if not evidence.is_dir():
        return plan
    labels = {subject.label for subject in plan.subjects}
    found = [m for m in measured_in(evidence) if m.subject in labels]
    widths = list(_half_widths(found, plan))
    return replace(plan, detectable_relative_error=median(widths)) if widths else plan


def _half_widths(found: Sequence[Measurement], plan: Plan) -> Iterator[float]:
    full = {(m.subject, m.evidence.document_sha256): m for m in found if m.spec == FULL_PRECISION}
    for m in found:
        beside = full.get((m.subject, m.evidence.document_sha256))
        if m.spec not in plan.specs or beside is None:
            continue
        if len(m.evidence.document_sha256) > plan.recipe.evaluation_documents:
            continue
        interval = relative_error(
            m.evidence.nll_sum, beside.evidence.nll_sum, plan.recipe.confidence
        )
        half = (interval.high - interval.low) / 2
        if math.isfinite(half):
            yield half
