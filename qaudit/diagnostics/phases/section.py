"""The section `Phases`: where the course of a run changes.

Only the longest run is shown; the others are in `audit.json`. What cannot be decided is listed
with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from qaudit.report import document as doc
from qaudit.report.format import NOT_FINITE, count, listing, plural
from qaudit.report.views import View
from qaudit.types import (
    FULL_PRECISION,
    ChangeRow,
    Course,
    Interval,
    Span,
)

TITLE = "Phases"

_KINDS = {"turn": "a turn", "jump": "a jump", "either": "a turn or a jump"}
_WHERE = {"before": "before", "around": "indistinguishable from", "after": "after"}


def section(view: View) -> doc.Section:
    course = main_course(view)
    if course is None:
        return doc.Section(TITLE, (), 5)
    further_courses = len(view.audit.diagnostics.phases) - 1
    more = (
        [doc.paragraph(f"{plural(further_courses, 'more run')} in `audit.json`.")]
        if further_courses
        else []
    )
    return doc.Section(TITLE, (doc.bullets(*_sentences(course)), *more), 5)


def main_course(view: View) -> Course | None:
    """Return the longest run, the first of equals."""
    courses = view.audit.diagnostics.phases
    return max(courses, key=lambda course: len(course.checkpoints), default=None)


def changed(course: Course) -> tuple[ChangeRow, ...]:
    return tuple(
        row for row in course.changes if row.verdict == "change" and row.scheme != FULL_PRECISION
    )


def _sentences(course: Course) -> Iterator[str]:
    """Yield what a run shows: the rate, the loss, the errors."""
    first, last = course.checkpoints[0], course.checkpoints[-1]
    yield f"From `{first}` to `{last}`, {plural(len(course.checkpoints), 'checkpoint')}."
    yield _span("The learning rate starts to fall", course.decay, course.decay_reason)
    yield _span(
        "Full-precision loss stops improving", course.loss_end, course.loss_end_reason, "When "
    )
    yield from (_change(course, row) for row in changed(course))
    yield from _rest([row for row in course.changes if row.scheme != FULL_PRECISION])


def _span(what: str, span: Span | None, reason: str, before: str = "Where ") -> str:
    if span is None:
        lower = what[0].lower() + what[1:]
        return f"{before}{lower} is unknown: {reason}."
    if span.low == span.high:
        return f"{what} at `{span.low_label}`."
    return f"{what} between `{span.low_label}` and `{span.high_label}`."


def _change(course: Course, row: ChangeRow) -> str:
    assert row.at is not None
    text = (
        f"The added loss under {row.scheme} has a change point, "
        f"{_KINDS[row.kind or 'either']}, at {_place(row.at, course.unit)}"
    )
    if row.decay is not None:
        text += f", {_WHERE[row.decay]} the start of the learning rate's decay"
    if row.loss_end is not None:
        text += f", {_WHERE[row.loss_end]} the end of the loss's improvement"
    return text + "."


def _rest(rows: Sequence[ChangeRow]) -> Iterator[str]:
    bent = [row.scheme for row in rows if row.verdict == "bend"]
    none = [row.scheme for row in rows if row.verdict == "none"]
    if bent:
        yield (
            f"Under {listing(bent)} the added loss follows no straight line, and a smooth "
            "curve may describe it as well as a change point."
        )
    if none:
        yield f"No change point is detectable under {listing(none)}."
    reasons: dict[str, list[str]] = {}
    for change in rows:
        if change.verdict == "unknown":
            reasons.setdefault(change.reason, []).append(change.scheme)
    for reason, schemes in reasons.items():
        under = "" if len(schemes) == len(rows) else f" under {listing(schemes)}"
        yield f"Change points were not searched{under}: {reason}."


def _place(at: Interval, unit: str) -> str:
    low, middle, high = (
        count(round(value)) if math.isfinite(value) else NOT_FINITE
        for value in (at.low, at.estimate, at.high)
    )
    named = "checkpoint" if unit == "checkpoints in order" else unit
    text = f"{middle} [{low}, {high}]"
    return f"{named} {text}" if named == "checkpoint" else f"{text} {named}"
