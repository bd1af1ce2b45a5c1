"""What runs show along their course, as rows of an audit's diagnostics and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qaudit.report.views import View
from qaudit.saved.decode import Row
from qaudit.saved.rows import row_of
from qaudit.types import Audit
from qaudit.types.phased import ChangeRow, Course

TABLE = "phases"


def phase_rows(courses: Sequence[Course]) -> dict[str, Any]:
    """Return the table `phases` as an audit's diagnostics keep it, if there is anything in it."""
    return {TABLE: [row_of(course) for course in courses]} if courses else {}


def courses_of(audit: Audit) -> tuple[Course, ...]:
    """Return the table `phases` of an audit's diagnostics."""
    if TABLE not in audit.diagnostics:
        return ()
    rows = Row(dict(audit.diagnostics), "audit.diagnostics").rows(TABLE)
    return tuple(row.build(Course) for row in rows)


def changed(course: Course) -> tuple[ChangeRow, ...]:
    """Return the schemes whose relative error has a change point."""
    return tuple(row for row in course.changes if row.verdict == "change" and row.scheme != "fp")


def main_course(view: View) -> Course | None:
    """Return the longest run, the first of equals: what pictures show."""
    found = courses_of(view.audit)
    return max(found, key=lambda course: len(course.checkpoints), default=None)
