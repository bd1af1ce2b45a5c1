"""The table of errors as the page has it: every subject, each cell with what it can be sorted by.

The words are the card's. Of a long series the rows that tell most are marked, and the script
folds the others; without it all of them are there. What is bold, and what a mark means, is also
said to those who do not see it.
"""

from __future__ import annotations

import math

from qaudit.report.card.errors import legend
from qaudit.report.elements import EMPTY, Html, element, joined, text, unseen
from qaudit.report.format import NOT_MEASURED, loss, percent
from qaudit.report.html.reading import FEWEST_ROWS, words
from qaudit.report.marks import BREACH, marks
from qaudit.report.telling import telling
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, MeasurementRow, Subject

CAPTION = "Relative error of every subject under every scheme, in %, with its interval"
MEANINGS = {BREACH: ("breach", "over its margin")}
DOUBT = ("doubt", "cannot be told whether it is over its margin")


def errors_part(view: View) -> Html:
    """Return the legend and the table."""
    if not view.subjects:
        return EMPTY
    body = joined((_rows(view)), "\n")
    table = element(
        "table",
        element("caption", text(CAPTION), class_="unseen"),
        element("thead", _head(view)),
        element("tbody", body),
        class_="sortable" if len(view.subjects) >= FEWEST_ROWS else None,
        id="errors",
    )
    box = element("div", table, class_="scroll", tabindex=0, role="group", aria_label=CAPTION)
    return joined([element("p", words(legend(view))), box])


def _head(view: View) -> Html:
    names = ["subject", "loss, full precision", *view.schemes]
    return element("tr", *(element("th", text(name), scope="col") for name in names))


def _rows(view: View) -> list[Html]:
    labels = tuple(subject.label for subject in view.subjects)
    columns = (FULL_PRECISION, *view.schemes)
    best = {scheme: view.best(scheme, labels) for scheme in columns}
    marked = marks(view)
    shown = {subject.label for subject in telling(view)}

    def cell(subject: Subject, scheme: str) -> Html:
        score = view.score(subject.label, scheme)
        mark = marked.get((subject.label, scheme), "")
        return _cell(score, mark, is_best=best[scheme] == subject.label)

    return [
        element(
            "tr",
            element("th", element("code", text(subject.label)), scope="row", data_value=place),
            *(cell(subject, scheme) for scheme in columns),
            class_=None if subject.label in shown else "more",
        )
        for place, subject in enumerate(view.subjects)
    ]


def _cell(score: MeasurementRow | None, mark: str, *, is_best: bool) -> Html:
    """Show an error over its interval; a loss where an error has no meaning."""
    if score is None:
        return element("td", text(NOT_MEASURED), unseen(" not measured"))
    error = None if score.scheme == FULL_PRECISION else score.relative_error
    value = score.ce.estimate if error is None else error.estimate
    if error is None:
        shown = loss(score.ce) if score.scheme == FULL_PRECISION else f"loss {loss(score.ce)}"
    else:
        shown = percent(error)
    head, bracket, bounds = shown.partition(" [")
    estimate = text(head)
    inner = [element("strong", estimate) if is_best else estimate]
    inner += [unseen(", the lowest loss of its column")] if is_best else []
    inner += [_mark(mark)] if mark else []
    inner += [text(" "), element("span", text(f"[{bounds}"), class_="interval")] if bracket else []
    sortable = score.scheme == FULL_PRECISION or error is not None
    return element("td", *inner, data_value=_exact(value) if sortable else None)


def _mark(mark: str) -> Html:
    kind, meaning = MEANINGS.get(mark, DOUBT)
    sign = element("span", text(mark), aria_hidden="true")
    return element("span", sign, unseen(f", {meaning}"), class_=f"mark {kind}")


def _exact(value: float) -> str | None:
    return f"{value:.9g}" if math.isfinite(value) else None
