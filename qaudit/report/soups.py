"""Comparisons of soups with their ingredients, for text and for figures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qaudit.report.views import View
from qaudit.types import Comparison, Subject

WORDS = {
    "a_better": "the soup has less",
    "b_better": "the ingredient has less",
    "equivalent": "the same",
    "inconclusive": "inconclusive",
}
"""What the verdict of a comparison with an ingredient means in a picture."""

MOST_MEMBERS = 6
"""Ingredients drawn in one row; of more, the best one alone."""


@dataclass(frozen=True)
class Row:
    """A soup against one of its ingredients under one scheme."""

    scheme: str
    opponent: str
    outright: Comparison
    difference: Comparison
    relative: Comparison | None
    is_best: bool  # the ingredient with the lowest loss under this scheme


def against(view: View, soup: Subject) -> tuple[Row, ...]:
    """Return a soup's comparisons with its ingredients, scheme by scheme."""
    opponents = view.opponents(soup.label)
    found: list[Row] = []
    for scheme in view.schemes:
        best = view.best(scheme, opponents)
        for opponent in opponents:
            outright = view.compared("outright", scheme, soup.label, opponent)
            difference = view.compared("difference_of_differences", scheme, soup.label, opponent)
            if outright is None or difference is None:
                continue
            relative = view.compared("relative_error_difference", scheme, soup.label, opponent)
            found.append(Row(scheme, opponent, outright, difference, relative, opponent == best))
    return tuple(found)


def in_order(view: View) -> tuple[Subject, ...]:
    """Return the soups, the pick first, then by their loss at the scheme of the pick."""
    pick = view.audit.pick

    def place(soup: Subject) -> tuple[bool, float]:
        score = view.score(soup.label, pick.scheme) if pick else None
        ce = score.ce.estimate if score else math.inf
        picked = pick is not None and soup.label == pick.subject
        return not picked, ce if math.isfinite(ce) else math.inf

    return tuple(sorted(view.soups, key=place))


def drawn(view: View) -> tuple[Subject, int, list[Row]]:
    """Return the soup that is drawn, the number of its ingredients, and the rows of its picture."""
    soup = next(soup for soup in in_order(view) if against(view, soup))
    rows = against(view, soup)
    opponents = len({row.opponent for row in rows})
    return soup, opponents, [row for row in rows if row.is_best or opponents <= MOST_MEMBERS]
