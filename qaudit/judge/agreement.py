"""Whether an audit says what its evidence says: numbers that were edited are refused.

Every number that a reader may act on is computed again from the per-document sums. Estimates are
sums and quotients that no version computes otherwise, so they have to agree whoever wrote the
audit. The bounds of intervals and the pick rest on methods that may get better, so they are held
to it only where the same version wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from qaudit.errors import AuditError
from qaudit.judge.pick import choose
from qaudit.judge.pooling import pooled_scores
from qaudit.judge.scores import score, score_tasks
from qaudit.judge.table import Table
from qaudit.types import Audit, Interval, Pick

RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""Sums of doubles in another order differ by less, and no reader sees as much."""

Row = tuple[str, Mapping[str, Any]]
"""What a row is about, and its numbers."""


def refuse_edited(audit: Audit, table: Table, *, version: str) -> None:
    """Refuse an audit whose numbers are not those of its evidence."""
    same = audit.qaudit == version
    files = {
        (s.subject, s.spec, s.calibration_seed): (s.evidence, s.evidence_sha256)
        for s in audit.measurements
    }
    again = {
        _place(s.subject, s.scheme, s.calibration_seed): vars(s)
        for s in (score(table, m, files) for m in table.measurements)
    }
    again |= {_place(p.subject, p.scheme, None): vars(p) for p in pooled_scores(table)}
    again |= {
        f"{t.task} of {_place(t.subject, t.scheme, None)}": vars(t) for t in score_tasks(table)
    }
    for where, said in _rows(audit):
        for name in _differing(said, again.get(where, {}), bounds=same):
            raise AuditError(
                f"the audit says another `{name}` of {where} than its evidence",
                hint="it was edited after it was written: scan again, or restore it",
            )
    _refuse_another_pick(audit, table, same=same)


def _rows(audit: Audit) -> Iterator[Row]:
    for s in audit.measurements:
        yield _place(s.subject, s.scheme, s.calibration_seed), vars(s)
    for p in audit.pooled:
        yield _place(p.subject, p.scheme, None), vars(p)
    for t in audit.tasks:
        yield f"{t.task} of {_place(t.subject, t.scheme, None)}", vars(t)


def _place(subject: str, scheme: str, seed: int | None) -> str:
    drawn = f", calibration seed {seed}" if seed is not None else ""
    return f"`{subject}` under {scheme}{drawn}"


def _differing(said: Mapping[str, Any], found: Mapping[str, Any], *, bounds: bool) -> Iterator[str]:
    for name, value in said.items():
        if isinstance(value, Interval) or name in _INTERVALS:
            if not _same_interval(value, found.get(name), bounds=bounds):
                yield name
        elif isinstance(value, int | float) and not _same(value, found.get(name)):
            yield name


_INTERVALS = ("ce", "relative_error", "absolute_change", "accuracy", "accuracy_drop")


def _same_interval(said: Interval | None, found: Interval | None, *, bounds: bool) -> bool:
    if said is None or found is None:
        return said is found
    names = ("estimate", "low", "high") if bounds else ("estimate",)
    return all(_same(getattr(said, name), getattr(found, name)) for name in names)


def _same(said: float, found: Any) -> bool:
    if not isinstance(found, int | float):
        return False
    return said == found or math.isclose(said, found, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _refuse_another_pick(audit: Audit, table: Table, *, same: bool) -> None:
    if not same:
        return
    found = choose(table)
    said, told = _place_of(audit.pick), _place_of(found)
    if said != told:
        raise AuditError(
            f"the audit picks {said}, and its evidence {told}",
            hint="it was edited after it was written: scan again, or restore it",
        )


def _place_of(pick: Pick | None) -> str:
    return f"`{pick.subject}` at {pick.scheme}" if pick else "nothing"
