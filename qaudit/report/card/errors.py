"""The whole table: what quantization adds to the loss of each subject under each scheme.

Of a long series the rows that a decision depends on are shown, wherever they are in it: what the
verdict names, the best of every column, the ends of stages. After them come checkpoints evenly
along the series, so that its course can be seen. The others are minor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from qaudit.report import document as doc
from qaudit.report.format import NOT_MEASURED, loss, percent
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, Subject

MOST_ROWS = 16
CAPTION = "Relative error of every subject under every scheme, in %, with its interval"
LEGEND = (
    "What quantization adds to the loss, in % of it, with its interval; "
    f"`{NOT_MEASURED}` not measured, `0` no change at all."
)
SHOWN = (
    "what the verdict names, the best of each column, ends of stages, and others evenly along "
    "the series"
)


def errors_section(view: View) -> tuple[doc.Block, ...]:
    """Return the table of relative errors with what it shows."""
    return (doc.paragraph(LEGEND, *_all_at_once(view)), _table(view)) if view.subjects else ()


def every_subject_section(view: View) -> tuple[doc.Block, ...]:
    """Return the whole table, folded, where the first one leaves rows out."""
    table = _table(view)
    if not any(row.minor for row in table.rows):
        return ()
    rows = tuple(replace(row, minor=False) for row in table.rows)
    return (doc.fold(f"All {len(rows)} subjects", replace(table, rows=rows)),)


def _table(view: View) -> doc.Table:
    schemes = (FULL_PRECISION, *view.schemes)
    shown = {subject.label for subject in shown_rows(view)}
    rows = tuple(
        doc.Row(
            (
                doc.name_cell(subject.label, value=k),
                *(_cell(view, subject.label, scheme) for scheme in schemes),
            ),
            minor=subject.label not in shown,
            chosen=view.main is not None and subject.label == view.main.subject,
        )
        for k, subject in enumerate(view.subjects)
    )
    return doc.Table(
        (
            doc.Column("subject"),
            doc.Column("loss, full precision", short=FULL_PRECISION),
            *doc.columns(*view.schemes),
        ),
        rows,
        CAPTION,
        shown=SHOWN,
        name="errors",
    )


def _cell(view: View, subject: str, scheme: str) -> doc.Cell:
    """Show an error over its interval; a loss where an error has no meaning."""
    score = view.score(subject, scheme)
    if score is None:
        return doc.cell(NOT_MEASURED)
    if scheme == FULL_PRECISION:
        return doc.cell(loss(score.ce), value=score.ce.estimate)
    if score.relative_error is None:
        return doc.cell(f"loss {loss(score.ce)}")
    value = score.relative_error.estimate
    return doc.interval_cell(
        percent(score.relative_error), value=value if math.isfinite(value) else None
    )


def _all_at_once(view: View) -> list[str]:
    """Return how wide the intervals would be if all of them had to hold together."""
    from qaudit.core.statistics import MINIMUM_DOCUMENTS, widening  # loads scipy

    cells = sum(
        view.error(subject.label, scheme) is not None
        for subject in view.subjects
        for scheme in view.schemes
    )
    if cells < 2 or view.documents < MINIMUM_DOCUMENTS:
        return []
    factor = widening(view.audit.plan.recipe.confidence, cells, view.documents)
    if not math.isfinite(factor):  # the level is next to 0 or 1
        return []
    return [
        f"Each interval holds by itself; for all {cells} to hold at once, read them "
        f"{factor:.1f} times as wide."
    ]


# --------------------------------------------------------------------- rows


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
    labels = [s.label for s in view.subjects]
    for one in view.verdict.classes if view.verdict else ():
        yield from (s for s in (one.subject, one.runner_up) if s in labels)
    yield from (s.label for s in (view.last, view.stage_end) if s is not None)
    for scheme in (*view.schemes, FULL_PRECISION):
        if (best := view.best(scheme)) is not None:
            yield best
    for subject, following in zip(view.checkpoints, view.checkpoints[1:], strict=False):
        if subject.first.stage != following.first.stage:
            yield subject.label
    if view.checkpoints:
        yield view.checkpoints[0].label


def _evenly(labels: list[str], count: int) -> list[str]:
    if count >= len(labels):
        return labels
    return [labels[int((k + 0.5) * len(labels) / count)] for k in range(count)]
