"""Measurements in, findings and the pick out. Pure: no files, no clock, no torch.

`table` knows which measurement belongs to which subject and what may be compared, `scores`
gives each measurement its intervals and `pooling` all draws of calibration text theirs,
`comparisons` compares soups with members and the last checkpoint with the ends of earlier stages,
`pick` chooses what to ship by an `objective`, `gate` applies a policy, and `rules` has one small
function for each other finding, with a code that stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date

from qaudit.judge.comparisons import compare
from qaudit.judge.gate import GateInput, policy_findings
from qaudit.judge.pick import Objective, choose
from qaudit.judge.pooling import noise, pooled_scores
from qaudit.judge.rules import Case, apply_rules
from qaudit.judge.scores import EvidenceFiles, score, score_tasks
from qaudit.judge.table import Table
from qaudit.types import (
    Comparison,
    Finding,
    Measurement,
    MeasurementRow,
    Noise,
    Pick,
    Policy,
    PooledRow,
    Subject,
    TaskRow,
)

__all__ = ["EvidenceFiles", "Judgement", "Margins", "judge"]


@dataclass(frozen=True)
class Margins:
    """Differences that do not matter; without one, there is no verdict of equivalence.

    `equivalence` is by kind of comparison: an interval inside plus or minus this makes both
    subjects equivalent.
    """

    equivalence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """Everything concluded from one set of measurements."""

    measurements: tuple[MeasurementRow, ...]
    tasks: tuple[TaskRow, ...]
    comparisons: tuple[Comparison, ...]
    findings: tuple[Finding, ...]
    pick: Pick | None
    pooled: tuple[PooledRow, ...] = ()
    noise: tuple[Noise, ...] = ()


def judge(  # noqa: PLR0913 - what was measured, and what it is to be judged by
    subjects: Sequence[Subject],
    measurements: Sequence[Measurement],
    evidence: EvidenceFiles,
    *,
    confidence: float = 0.95,
    margins: Margins | None = None,
    objective: Objective | None = None,
    floor: Mapping[tuple[str, str], float] | None = None,
    policy: Policy | None = None,
    today: date = date.min,
) -> Judgement:
    """Judge the measurements of subjects in series order.

    `evidence` names the file and sha256 of each (subject, spec, calibration seed); `floor` has the
    nats per token by which rounding moves a (subject, scheme), where that was measured. Ignores
    of a policy expire as of `today`.
    """
    margins = margins or Margins()
    table = Table.of(subjects, measurements, confidence)
    scores = tuple(score(table, m, evidence) for m in table.measurements)
    comparisons = compare(table, margins.equivalence)
    pick = choose(table, objective)
    over, made_of = pooled_scores(table), noise(table, floor or {})
    case = Case(table, scores, comparisons, pick, over, made_of)
    held = policy_findings(policy, GateInput(table), today) if policy else ()
    tasks = tuple(score_tasks(table))
    return Judgement(scores, tasks, comparisons, (*held, *apply_rules(case)), pick, over, made_of)
