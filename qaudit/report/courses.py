"""The courses of an audit: which one is shown, and where its errors change."""

from __future__ import annotations

from qaudit.report.views import View
from qaudit.types.phases import ChangeRow, Course


def changed(course: Course) -> tuple[ChangeRow, ...]:
    """Return the schemes whose relative error has a change point."""
    return tuple(row for row in course.changes if row.verdict == "change" and row.scheme != "fp")


def main_course(view: View) -> Course | None:
    """Return the longest run, the first of equals: what pictures show."""
    courses = view.audit.diagnostics.phases
    return max(courses, key=lambda course: len(course.checkpoints), default=None)
