"""Measurements in, findings and the pick out. Pure: no files, no clock, no torch.

`table` knows which measurement belongs to which subject and what may be compared, `scores` gives
each measurement and each comparison of subjects its intervals, `quantities` are sums over documents
of one cell or several, `pick` chooses what to ship by an objective, `gate` applies a policy, and
`rules` has one small function for each other finding, with a code that stays.

An audit whose numbers disagree with its evidence is refused: every number that a reader may act on
is computed again from the per-document sums. Estimates are sums and quotients that every version
computes alike, so they must agree in any audit. The bounds of intervals, comparisons, the pick and
the verdict come from methods that may improve, so they must agree only in an audit of the same
version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from types import MappingProxyType
from typing import Any

from qaudit.errors import AuditError
from qaudit.judge.choose import choices, pick_of
from qaudit.judge.gate import GateInput, findings_of, gate, verdict_of
from qaudit.judge.rules import RULES, RuleCase
from qaudit.judge.scores import compare, score
from qaudit.judge.table import EvidenceFiles, Measurements, Moved, noise
from qaudit.judge.tasks import score_tasks
from qaudit.types import (
    AuditRecord,
    ClassVerdict,
    Comparison,
    Finding,
    Interval,
    MeasurementRow,
    Noise,
    Pick,
    Policy,
    TaskRow,
    Verdict,
    reference_in,
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


def judge(
    every: Measurements,
    files: EvidenceFiles,
    held: GateInput | None = None,
    *,
    floor: Mapping[tuple[str, str], Moved] = MappingProxyType({}),
    policy: Policy | None = None,
    today: date = date.min,
    reference: str | None = None,
) -> Judgement:
    """Judge measurements, with every draw of calibration text; the first draw decides.

    `files` names the file and sha256 of each (subject, spec, calibration seed), `held` is what a
    policy is held against, and `floor` has how far rounding moves a (subject, scheme). Ignores of
    a policy expire as of `today`.
    """
    held = held or GateInput(every.first_draws)
    scores = tuple(score(every, m, files, reference) for m in every.measurements)
    answer = gate(policy, held, today=today) if policy else None
    pick = pick_of(answer.classes) if answer else held.pick
    case = RuleCase(held.table, scores, compare(held.table, held.searched), pick)
    by_rules = (finding for rule in RULES for finding in rule(case))
    return Judgement(
        measurements=scores,
        tasks=tuple(score_tasks(held.table, files, reference)),
        comparisons=case.comparisons,
        findings=(*(findings_of(answer) if answer else ()), *by_rules),
        pick=pick,
        noise=tuple(noise(every, floor)),
        verdict=verdict_of(answer, str(held.objective)) if answer else None,
    )


# ------------------------------------------------------------------------ an audit that is saved

EDITED = "it was edited after it was written: scan again, or restore it"

RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""Sums of doubles in another order differ by less, and no report prints as many digits."""

_BY_METHOD = ("documents_for_loss", "documents_for_kl")
_ACTED_ON = ("bit_class", "calibrates", "imported", "verdict")
_INTERVALS = (
    "ce", "relative_error", "absolute_change", "accuracy", "accuracy_drop", "drop", "margin_factor",
)  # fmt: skip


def refuse_edited(audit: AuditRecord, table: Measurements, *, version: str) -> None:
    """Raise AuditError for the first number that disagrees with the evidence.

    `table` has every draw of calibration text.
    """
    is_same, first = audit.qaudit == version, table.first_draws
    searched = {soup.label: soup.counted for soup in audit.diagnostics.greedy}
    compared = (audit.comparisons, compare(first, searched)) if is_same else ((), ())
    again = dict(_rows(*rows_again(audit, table), compared[1]))
    for where, saved in _rows(audit.measurements, audit.tasks, compared[0]):
        for name in _differing(saved, again.get(where, {}), bounds=is_same):
            raise AuditError(f"`{name}` of {where} disagrees with its evidence", hint=EDITED)
    if is_same:
        _refuse_another_pick(audit, first)


def rows_again(
    audit: AuditRecord, table: Measurements
) -> tuple[list[MeasurementRow], list[TaskRow]]:
    """Return the rows of an audit as its evidence gives them now."""
    files: EvidenceFiles = {
        (s.subject, s.spec, s.calibration_seed): (s.evidence, s.evidence_sha256)
        for s in audit.measurements
    }
    subject = reference_in(audit.plan.subjects, audit.plan.recipe.reference)
    reference = subject.label if subject else None
    scores = [score(table, m, files, reference) for m in table.measurements]
    return scores, list(score_tasks(table.first_draws, reference=reference))


def refuse_another_verdict(saved: Verdict, computed: Verdict) -> None:
    """Raise AuditError if an audit says that something else ships than its numbers do."""
    says, gives = (
        f"{verdict.status} by `{verdict.policy}`: "
        + ", ".join(
            f"{c.bit_class} {c.status} (`{c.subject}` at {c.scheme})" for c in verdict.classes
        )
        for verdict in (saved, computed)
    )
    if says != gives:
        raise AuditError(f"its verdict is {says}, and its numbers give {gives}", hint=EDITED)


def _rows(
    scores: Iterable[MeasurementRow], tasks: Iterable[TaskRow], comparisons: Iterable[Comparison]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the subject, scheme and seed, task or kind of each row, and its numbers."""
    for s in scores:
        yield f"`{s.subject}` under {s.scheme}, calibration seed {s.calibration_seed}", vars(s)
    for t in tasks:
        yield f"{t.task} of `{t.subject}` under {t.scheme}", vars(t)
    for c in comparisons:
        yield f"`{c.kind}` of `{c.a}` and `{c.b}` under {c.scheme}", vars(c)


def _differing(
    saved: Mapping[str, Any], computed: Mapping[str, Any], *, bounds: bool
) -> Iterator[str]:
    for name, value in saved.items():
        other, same = computed.get(name), True
        if name in _ACTED_ON:
            same = value == other
        elif isinstance(value, Interval) or name in _INTERVALS:
            same = _same_interval(value, other, bounds=bounds)
        elif isinstance(value, int | float) and (bounds or name not in _BY_METHOD):
            same = _same(value, other)
        if not same:
            yield name


def _same_interval(saved: Interval | None, computed: Interval | None, *, bounds: bool) -> bool:
    if saved is None or computed is None:
        return saved is computed
    names = ("estimate", "low", "high") if bounds else ("estimate",)
    return all(_same(getattr(saved, name), getattr(computed, name)) for name in names)


def _same(saved: float, computed: Any) -> bool:
    if not isinstance(computed, int | float):
        return False
    # Equal infinities are not close.
    return saved == computed or math.isclose(saved, computed, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _refuse_another_pick(audit: AuditRecord, table: Measurements) -> None:
    """Refuse what no policy picks: it is none of those that may ship of its class."""
    nothing = ["nothing"]
    may_ship = {
        choice.bit_class: [f"`{m.subject}` at {m.scheme}" for m in choice.candidates] or nothing
        for choice in choices(table, classes=audit.plan.recipe.bits)
    }
    classes = audit.verdict.classes if audit.verdict else ()
    pick = pick_of(classes)
    every = [name for names in may_ship.values() for name in names] or nothing
    saved = [(row, may_ship.get(row.bit_class, nothing)) for row in classes]
    for row, names in (*saved, (audit.pick, [_name(pick)] if pick else every)):
        if (name := _name(row)) not in names:
            raise AuditError(f"the audit picks {name}, and its evidence {names[0]}", hint=EDITED)


def _name(row: ClassVerdict | Pick | None) -> str:
    return f"`{row.subject}` at {row.scheme}" if row and row.subject else "nothing"
