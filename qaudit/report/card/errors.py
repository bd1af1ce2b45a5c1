"""The one table: what quantization adds to the loss of each subject under each scheme.

Of a long series the rows that tell most are shown, and all of them folded beneath.
"""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.report.format import NOT_MEASURED, loss, percent
from qaudit.report.markdown import cell, folded, plain, table
from qaudit.report.marks import BREACH, UNCLEAR, marks
from qaudit.report.telling import telling
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, Subject


def errors_section(view: View) -> str:
    """Return the table of relative errors with its legend, of the rows that tell most."""
    if not view.subjects:
        return ""
    shown = telling(view)
    said = legend(view)
    if len(shown) < len(view.subjects):
        said += (
            f" {len(shown)} of {len(view.subjects)} subjects are shown: the pick, the best of "
            "each column, ends of stages, what a policy objects to, and others evenly along the "
            "series."
        )
    return f"{said}\n\n{_table(view, shown)}"


def every_subject_section(view: View) -> str:
    """Return the whole table, folded, where the first one leaves rows out."""
    if len(telling(view)) == len(view.subjects):
        return ""
    return folded(f"All {len(view.subjects)} subjects", _table(view, view.subjects))


def _table(view: View, shown: Sequence[Subject]) -> str:
    labels = tuple(subject.label for subject in view.subjects)
    columns = (FULL_PRECISION, *view.schemes)
    best = {scheme: view.best(scheme, labels) for scheme in columns}
    marked = marks(view)
    rows = [
        [
            cell(subject.label),
            *(
                _cell(view, subject.label, s, best[s], marked.get((subject.label, s), ""))
                for s in columns
            ),
        ]
        for subject in shown
    ]
    return table(["", "loss, full precision", *map(plain, view.schemes)], rows)


def _cell(view: View, subject: str, scheme: str, best: str | None, mark: str) -> str:
    """Print an error over its interval; a loss where an error has no meaning."""
    score = view.score(subject, scheme)
    if score is None:
        return NOT_MEASURED
    if scheme == FULL_PRECISION or score.relative_error is None:
        text = loss(score.ce) if scheme == FULL_PRECISION else f"loss {loss(score.ce)}"
    else:
        text = percent(score.relative_error)
    head, bracket, bounds = text.partition(" [")
    head = f"{head} {mark}" if mark else head
    head = f"**{head}**" if subject == best else head
    # No space inside an interval: a narrow column would break it over two lines.
    return f"{head}<br><sub>[{bounds.replace(' ', '&nbsp;')}</sub>" if bracket else head


def legend(view: View) -> str:
    """Say what stands in a cell of the table, and how its intervals are to be read."""
    said = [
        "What quantization adds to the loss, in % of it, with its interval; "
        f"`{NOT_MEASURED}` not measured, `0` no change at all.",
        "**Bold**: the lowest loss of its column, by estimate: the best one under that scheme.",
    ]
    found = set(marks(view).values())
    if BREACH in found:
        said.append(f"`{BREACH}`: over the margin that the policy sets.")
    if UNCLEAR in found:
        said.append(f"`{UNCLEAR}`: these documents cannot tell whether it is.")
    said += _all_at_once(view)
    return " ".join(said)


def _all_at_once(view: View) -> list[str]:
    """Say how wide the intervals would be if all of them had to hold together."""
    from qaudit.core.statistics import MINIMUM_DOCUMENTS, widening  # loads scipy

    cells = sum(
        score is not None and score.relative_error is not None
        for subject in view.subjects
        for score in (view.score(subject.label, scheme) for scheme in view.schemes)
    )
    if cells < 2 or view.documents < MINIMUM_DOCUMENTS:
        return []
    factor = widening(view.audit.plan.recipe.confidence, cells, view.documents)
    return [
        f"Each interval holds by itself; for all {cells} to hold at once, read them "
        f"{factor:.1f} times as wide."
    ]
