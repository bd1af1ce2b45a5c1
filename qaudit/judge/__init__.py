"""Measurements in, findings and the pick out. Pure: no files, no clock, no torch.

`table` knows which measurement belongs to which subject and what may be compared, `scores` gives
each measurement and each comparison of subjects its intervals, `quantities` are sums over documents
of one cell or several, `pick` chooses what to ship by an objective, `gate` applies a policy, and
`rules` has one small function for each other finding, with a code that stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from types import MappingProxyType
from typing import Any

from qaudit.judge.choose import LOSS, NO_SEARCH, Objective, pick_of
from qaudit.judge.gate import GateInput, findings_of, gate, verdict_of
from qaudit.judge.quantities import Moved, noise
from qaudit.judge.rules import RULES, RuleCase
from qaudit.judge.scores import compare, score
from qaudit.judge.table import EvidenceFiles, Measurements
from qaudit.judge.tasks import score_tasks
from qaudit.types import (
    Comparison,
    Finding,
    Measurement,
    MeasurementRow,
    Noise,
    Pick,
    Policy,
    Subject,
    TaskRow,
    Verdict,
)

__all__ = ["EvidenceFiles", "Judgement", "judge"]


@dataclass(frozen=True)
class Judgement:
    """Everything concluded from one set of measurements."""

    measurements: tuple[MeasurementRow, ...]
    tasks: tuple[TaskRow, ...]
    comparisons: tuple[Comparison, ...]
    findings: tuple[Finding, ...]
    pick: Pick | None
    noise: tuple[Noise, ...] = ()
    verdict: Verdict | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """What an audit has of it: all but the noise, which is among the diagnostics."""
        return {name: value for name, value in vars(self).items() if name != "noise"}


def judge(  # noqa: PLR0913 - what was measured, and what it is to be judged by
    subjects: Sequence[Subject],
    measurements: Sequence[Measurement],
    evidence: EvidenceFiles,
    *,
    confidence: float = 0.95,
    objective: Objective | None = None,
    floor: Mapping[tuple[str, str], Moved] = MappingProxyType({}),
    policy: Policy | None = None,
    today: date = date.min,
    searched: Mapping[str, int] = NO_SEARCH,
    planned: Sequence[Subject] = (),
    skipped: Mapping[str, str] | None = None,
    bits: Sequence[str] = (),
    reference: str | None = None,
    protocol: Mapping[str, Any] = MappingProxyType({}),
) -> Judgement:
    """Judge the measurements of subjects in series order.

    `evidence` names the file and sha256 of each (subject, spec, calibration seed); `floor` has
    how far rounding moves a (subject, scheme). Ignores of
    a policy expire as of `today`; its rules read what was `planned`, and why it was `skipped`. No
    `bits`: all classes are decided. `searched` has how many means were tried for each searched
    soup. Of several draws of calibration text the first is judged.
    """
    every = Measurements.of(subjects, measurements, confidence)
    table = every.first_draws
    scores = tuple(score(every, m, evidence, reference) for m in every.measurements)
    measured = {m.subject for m in table.measurements}
    held = GateInput(
        table,
        planned=tuple(planned),
        skipped={k: why for k, why in (skipped or {}).items() if k not in measured},
        bits=tuple(bits),
        searched=searched,
        objective=objective or LOSS,
        protocol=protocol,
    )
    answer = gate(policy, held, today=today) if policy else None
    pick = pick_of(answer.classes) if answer else held.pick
    case = RuleCase(table, scores, compare(table, searched), pick)
    by_rules = (finding for rule in RULES for finding in rule(case))
    return Judgement(
        measurements=scores,
        tasks=tuple(score_tasks(table, evidence, reference)),
        comparisons=case.comparisons,
        findings=(*(findings_of(answer) if answer else ()), *by_rules),
        pick=pick,
        noise=noise(every, floor),
        verdict=verdict_of(answer, str(held.objective)) if answer else None,
    )
