"""How small a relative error the text of a plan can tell from none, by what was measured on it.

That depends on how much the damage differs between documents, which is unknown before
anything is measured: the spread of another model on another text is no guide. So it is
computed from measurements of this very audit, where an earlier run left some, and is otherwise
not known. Told is the difference from zero that an audit like the earlier one, with as many
draws of calibration text, finds in four of five cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from qaudit.core.items import Marked
from qaudit.core.power import detectable
from qaudit.core.statistics import excess
from qaudit.judge.tasks import answers, tasks_of
from qaudit.types import FULL_PRECISION, Measurement, Plan, TaskEvidence


def with_detectable(plan: Plan, measurements: Sequence[Measurement]) -> Plan:
    """Return the plan with the effect that a typical comparison detects."""
    labels = {subject.label for subject in plan.subjects}
    planned = [m for m in measurements if m.subject in labels]
    effects, flips = list(_effects(planned, plan)), list(_flips(planned, plan))
    return replace(
        plan,
        detectable_relative_error=median(effects) if effects else None,
        flips=median(flips) if flips else None,
    )


def _flips(measurements: Sequence[Measurement], plan: Plan) -> Iterator[float]:
    """Yield the share of answers that each scheme moved from right to wrong or back."""
    tasks: dict[tuple[str, str], dict[str, TaskEvidence]] = {}
    for m in measurements:
        tasks.setdefault((m.subject, m.spec), {}).update(tasks_of(m))
    for (subject, spec), evidence in tasks.items():
        full = tasks.get((subject, FULL_PRECISION), {})
        pairs = [
            Marked(answers(task).right_N, answers(full[name]).right_N)
            for name, task in evidence.items()
            if spec in plan.specs and name in full and len(full[name].nll) == len(task.nll)
        ]
        if pairs:
            yield sum(p.lost + p.won for p in pairs) / sum(len(p.full_N) for p in pairs)


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
