"""Which rows of a long series are shown, so that it can be read.

Rows that a decision depends on come first, wherever they are in the series: the pick and its
rivals, what a policy objects to, the best of every column, the ends of stages. The remaining rows
are checkpoints evenly along the series, so that its course can be seen.
"""

from __future__ import annotations

from collections.abc import Iterator

from qaudit.report.marks import BREACH, marks
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, Subject

MOST_ROWS = 16


def shown_rows(view: View, most: int = MOST_ROWS) -> tuple[Subject, ...]:
    """Return at most so many subjects, in series order; all of them where they are few."""
    if len(view.subjects) <= most:
        return view.subjects
    wanted = list(dict.fromkeys(_wanted(view)))[:most]
    others = [s.label for s in view.checkpoints if s.label not in set(wanted)]
    shown = {*wanted, *_evenly(others, most - len(wanted))}
    return tuple(s for s in view.subjects if s.label in shown)


def _wanted(view: View) -> Iterator[str]:
    """Yield the labels of rows that a decision depends on, most important first."""
    labels = tuple(s.label for s in view.subjects)
    known = set(labels)
    pick = view.audit.pick
    if pick is not None:
        yield from (s for s in (pick.subject, pick.runner_up, pick.reference) if s in known)
    yield from (s.label for s in (view.last, view.stage_end) if s is not None)
    over = [subject for (subject, _), mark in marks(view).items() if mark == BREACH]
    yield from (label for label in labels if label in set(over))
    for scheme in (*view.schemes, FULL_PRECISION):
        if (best := view.best(scheme, labels)) is not None:
            yield best
    for subject, following in zip(view.checkpoints, view.checkpoints[1:], strict=False):
        if subject.first.stage != following.first.stage:
            yield subject.label
    if view.checkpoints:
        yield view.checkpoints[0].label


def _evenly(labels: list[str], count: int) -> list[str]:
    """Return so many of the labels, as evenly spaced as can be."""
    if count >= len(labels):
        return labels
    return [labels[int((k + 0.5) * len(labels) / count)] for k in range(count)]
