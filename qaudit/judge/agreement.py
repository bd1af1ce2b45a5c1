"""Refuse an audit whose numbers disagree with its evidence.

Every number that a reader may act on is computed again from the per-document sums. Estimates are
sums and quotients that every version computes alike, so they must agree in any audit. The bounds
of intervals, comparisons, the pick and the verdict come from methods that may improve, so they
must agree only in an audit of the same version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from qaudit.errors import AuditError
from qaudit.judge.choose import ClassChoice, choices, pick_of
from qaudit.judge.scores import compare, score
from qaudit.judge.table import EvidenceFiles, Measurements
from qaudit.judge.tasks import score_tasks
from qaudit.types import (
    AuditRecord,
    Comparison,
    Interval,
    MeasurementRow,
    TaskRow,
    Verdict,
    reference_in,
)

EDITED = "it was edited after it was written: scan again, or restore it"

RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""Sums of doubles in another order differ by less, and no report prints as many digits."""


def refuse_edited(audit: AuditRecord, table: Measurements, *, version: str) -> None:
    """Raise AuditError for the first number that disagrees with the evidence.

    `table` has every draw of calibration text.
    """
    same, first = audit.qaudit == version, table.first_draws
    again = dict(_rows(*rows_again(audit, table)))
    for where, saved in _rows(audit.measurements, audit.tasks):
        for name in _differing(saved, again.get(where, {}), bounds=same):
            raise AuditError(f"`{name}` of {where} disagrees with its evidence", hint=EDITED)
    if not same:
        return
    searched = {soup.label: soup.counted for soup in audit.diagnostics.greedy}
    computed = {_pair(row): row for row in compare(first, searched)}
    for row in audit.comparisons:
        new = computed.get(_pair(row))
        if (
            new is None
            or row.verdict != new.verdict
            or not _same_interval(row.interval, new.interval, bounds=True)
        ):
            raise AuditError(f"{_pair(row)} disagrees with its evidence", hint=EDITED)
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
    scores: Iterable[MeasurementRow], tasks: Iterable[TaskRow]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the subject, scheme and seed or task of each row, and its numbers."""
    for s in scores:
        yield f"`{s.subject}` under {s.scheme}, calibration seed {s.calibration_seed}", vars(s)
    for t in tasks:
        yield f"{t.task} of `{t.subject}` under {t.scheme}", vars(t)


def _differing(
    saved: Mapping[str, Any], computed: Mapping[str, Any], *, bounds: bool
) -> Iterator[str]:
    for name, value in saved.items():
        if name in _ACTED_ON:
            if value != computed.get(name):
                yield name
        elif isinstance(value, Interval) or name in _INTERVALS:
            if not _same_interval(value, computed.get(name), bounds=bounds):
                yield name
        elif (
            isinstance(value, int | float)
            and (bounds or name not in _BY_METHOD)
            and not _same(value, computed.get(name))
        ):
            yield name


_BY_METHOD = ("documents_for_loss", "documents_for_kl")
_ACTED_ON = ("bit_class", "calibrates", "imported")
_INTERVALS = (
    "ce", "relative_error", "absolute_change", "accuracy", "accuracy_drop", "drop", "margin_factor",
)  # fmt: skip


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


def _pair(row: Comparison) -> str:
    return f"`{row.kind}` of `{row.a}` and `{row.b}` under {row.scheme}"


def _refuse_another_pick(audit: AuditRecord, table: Measurements) -> None:
    """Refuse what no policy picks: it is none of those that may ship of its class."""
    made = {choice.bit_class: choice for choice in choices(table, classes=audit.plan.recipe.bits)}
    pick = audit.pick
    if audit.verdict is not None:
        for row in audit.verdict.classes:
            saved, names = _name(row.subject, row.scheme), _options(made.get(row.bit_class))
            if saved not in names:
                raise AuditError(
                    f"the audit picks {saved}, and its evidence {names[0]}", hint=EDITED
                )
        pick = pick_of(audit.verdict.classes)
    names = [name for choice in made.values() for name in _options(choice)] or ["nothing"]
    if pick is not None:
        names = [_name(pick.subject, pick.scheme)] if audit.verdict else names
    saved = _name(audit.pick.subject, audit.pick.scheme) if audit.pick else "nothing"
    if saved not in names:
        raise AuditError(f"the audit picks {saved}, and its evidence {names[0]}", hint=EDITED)


def _options(choice: ClassChoice | None) -> list[str]:
    if choice is None or choice.leader is None:
        return ["nothing"]
    return [_name(m.subject, m.scheme) for m in (*choice.preferred, choice.leader)]


def _name(subject: str | None, scheme: str | None) -> str:
    return f"`{subject}` at {scheme}" if subject else "nothing"
