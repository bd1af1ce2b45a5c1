"""Each soup beside its ingredients: which is better, and which loses less to quantization.

The two questions can have opposite answers, so both are in every row. Of several soups the best
is shown in full, the next ones folded, and the others in a row each.
"""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.report import sentences
from qaudit.report.card.series import picture
from qaudit.report.format import NOT_MEASURED, listing, percent, plural, spread
from qaudit.report.markdown import cell, code, folded, plain, prose, table
from qaudit.report.soups import Row, against, in_order
from qaudit.report.views import View
from qaudit.saved.searches import searches_of, sentence
from qaudit.types import Subject

SHOWN = 3
MEMBERS = 12
HEADER = [
    "scheme",
    "against",
    "loss, nats",
    "lost, nats",
    "lost, % points",
    "the soup is",
]
LEGEND = (
    "Soup minus ingredient: negative favours the soup. *Loss* is that of the quantized models, "
    "which decides what to ship; *lost* is what quantization took of it."
)


def soup_section(view: View, pictures_at: str | None) -> str:
    """Return the section on soups, empty where there are none."""
    soups = [soup for soup in in_order(view) if against(view, soup)]
    if not soups:
        return ""
    parts = [LEGEND, picture(view, "soups", pictures_at)]
    parts += [_in_full(view, soups[0])]
    parts += [folded(soup.label, _in_full(view, soup)) for soup in soups[1:SHOWN]]
    parts += [_in_short(view, soups[SHOWN:])] if len(soups) > SHOWN else []
    return "\n\n".join(filter(None, parts))


def _in_full(view: View, soup: Subject) -> str:
    every = against(view, soup)
    best = [row for row in every if row.is_best]
    summary = [(row.scheme, row.outright, row.difference) for row in best]
    lines = [_what(view, soup), prose(sentences.soup_summary(summary, soup.label)), _table(best)]
    if len(every) > len(best):
        lines.append(folded("Against every ingredient", _table(every)))
    return "\n\n".join(lines)


def _in_short(view: View, soups: list[Subject]) -> str:
    """Give every other soup a row: against its best ingredient, at the scheme of the pick."""
    scheme = view.audit.pick.scheme if view.audit.pick else view.schemes[0]
    rows = [
        [cell(soup.label), *_cells(row)[1:]]
        for soup in soups
        for row in against(view, soup)
        if row.is_best and row.scheme == scheme
    ]
    title = f"{plural(len(rows), 'more soup')}, at {scheme} against the best ingredient"
    return folded(title, table(["soup", *HEADER[1:]], rows)) if rows else ""


def _what(view: View, soup: Subject) -> str:
    """Say what a soup is made of, and how that was found where it was searched for."""
    text = f"{code(soup.label)} is the {plain(soup.merge or '')} of {_ingredients(soup)}."
    search = searches_of(view.audit).get(soup.label)
    return text if search is None else f"{text} {prose(sentence(search))}"


def _ingredients(soup: Subject) -> str:
    alike = len({weight for _, weight in soup.members}) == 1
    said = [
        code(c.label) if alike else f"{weight:.3g} of {code(c.label)}" for c, weight in soup.members
    ]
    more = len(said) - MEMBERS
    return listing([*said[:MEMBERS], f"{more} more"] if more > 0 else said)


def _table(rows: Sequence[Row]) -> str:
    return table(HEADER, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    return [
        plain(row.scheme),
        cell(row.opponent),
        spread(row.outright.interval),
        spread(row.difference.interval),
        percent(row.relative.interval) if row.relative else NOT_MEASURED,
        sentences.soup_reading(row.outright, row.difference),
    ]
