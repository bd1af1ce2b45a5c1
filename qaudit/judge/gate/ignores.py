"""Ignores: breaches that a policy accepts until a day.

An ignore covers a breach and an inconclusive check: a cell near its margin would otherwise
be excused on some documents and stop the release on others. What was not measured it covers only
where it names QA025, the code of required coverage. An ignore that has expired, or that nothing
needs, is a warning: it hides nothing today, and may tomorrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date

from qaudit.judge.gate.coverage import REQUIRED
from qaudit.judge.gate.held import matches
from qaudit.types import Check, Finding, Ignore

ROTTEN = "QA027"


def ignored(
    checks: Sequence[Check], ignores: Sequence[Ignore], today: date
) -> tuple[tuple[Check, ...], tuple[Finding, ...]]:
    """Return the checks with what is ignored, and warnings about ignores that do nothing."""
    valid = [ignore for ignore in ignores if today <= ignore.until]
    marked = tuple(
        replace(check, ignored=next((i for i in valid if _covers(i, check)), None))
        for check in checks
    )
    used = {id(i) for i in valid for check in checks if _covers(i, check)}
    warnings = []
    for ignore in ignores:
        if ignore.until < today:
            expired = f"expired on {ignore.until.isoformat()}"
            warnings.append(_warning(ignore, expired, "fix the breach, or renew the ignore"))
        elif id(ignore) not in used:
            warnings.append(_warning(ignore, "matches nothing that needs it", "remove it"))
    return marked, tuple(warnings)


def _covers(ignore: Ignore, check: Check) -> bool:
    by_code = ignore.rule == check.rule
    if not by_code and ignore.rule != check.name:
        return False
    excusable = check.outcome in ("fail", "inconclusive")
    if check.outcome == "missing":
        excusable = check.rule == REQUIRED and by_code
    scheme = check.scheme or ""
    return excusable and matches(check.subject, ignore.subject) and matches(scheme, ignore.scheme)


def _warning(ignore: Ignore, what: str, hint: str) -> Finding:
    return Finding(
        rule=ROTTEN,
        level="warn",
        subject=ignore.subject,
        scheme=None if ignore.scheme == "*" else ignore.scheme,
        message=f"the ignore of `{ignore.rule}` in line {ignore.line} {what}: {ignore.reason}",
        hint=hint,
    )
