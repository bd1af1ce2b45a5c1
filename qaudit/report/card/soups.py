"""Each soup beside its ingredients: which is better, and which loses less to quantization.

The two questions can have opposite answers, so both are in every row. Of several soups the best
is shown in full, the next ones folded, and the others in a row each.
"""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.report import sentences
from qaudit.report.card.series import picture
from qaudit.report.document import (
    Block,
    Cell,
    Inline,
    Row,
    Table,
    cell,
    code,
    columns,
    fold,
    inline,
    name_cell,
    paragraph,
    words,
)
from qaudit.report.format import NOT_MEASURED, percent, plural, spread
from qaudit.report.searches import searches_of, sentence
from qaudit.report.soups import Row as Pair
from qaudit.report.soups import against, in_order
from qaudit.report.views import View
from qaudit.types import Subject

SHOWN = 3
MEMBERS = 12
COLUMNS = columns("against", "loss, nats", "lost, nats", "lost, % points", "the soup is")
LEGEND = (
    "Soup minus ingredient: negative favours the soup. `loss` is that of the quantized models, "
    "which decides what to ship; `lost` is what quantization added to it."
)


def soup_section(view: View) -> tuple[Block, ...]:
    """Return the section on soups, empty where there are none."""
    soups = [soup for soup in in_order(view) if against(view, soup)]
    if not soups:
        return ()
    parts = [paragraph(LEGEND), *picture(view, "soups"), *_in_full(view, soups[0])]
    parts += [fold(soup.label, *_in_full(view, soup)) for soup in soups[1:SHOWN]]
    return (*parts, *_in_short(view, soups[SHOWN:]))


def _in_full(view: View, soup: Subject) -> tuple[Block, ...]:
    every = against(view, soup)
    best = [row for row in every if row.is_best]
    summary = [(row.scheme, row.outright, row.difference) for row in best]
    blocks: list[Block] = [
        paragraph(*_what(view, soup)),
        paragraph(sentences.soup_summary(summary, soup.label)),
        _table(best),
    ]
    if len(every) > len(best):
        blocks.append(fold("Against every ingredient", _table(every)))
    return tuple(blocks)


def _in_short(view: View, soups: list[Subject]) -> tuple[Block, ...]:
    """Give every other soup a row: against its best ingredient, at the scheme of the pick."""
    scheme = view.audit.pick.scheme if view.audit.pick else view.schemes[0]
    rows = tuple(
        Row((name_cell(soup.label), *_cells(row)))
        for soup in soups
        for row in against(view, soup)
        if row.is_best and row.scheme == scheme
    )
    title = f"{plural(len(rows), 'more soup')}, at {scheme} against the best ingredient"
    return (fold(title, Table((*columns("soup"), *COLUMNS), rows)),) if rows else ()


def _what(view: View, soup: Subject) -> list[Inline]:
    """Name what a soup is made of, and how that was found where it was searched for."""
    made = (*code(soup.label), *words(f" is the {soup.merge or ''} of "))
    search = searches_of(view.audit).get(soup.label)
    said = [(*made, *_ingredients(soup), *words("."))]
    return said if search is None else [*said, inline(sentence(search))]


def _ingredients(soup: Subject) -> Inline:
    alike = len({weight for _, weight in soup.members}) == 1
    names = [
        (*words("" if alike else f"{weight:.3g} of "), *code(c.label)) for c, weight in soup.members
    ]
    more = len(names) - MEMBERS
    names = [*names[:MEMBERS], words(f"{more} more")] if more > 0 else names
    joins = ["", *[", "] * (len(names) - 2), *[" and "] * (len(names) > 1)]
    return tuple(
        run for join, name in zip(joins, names, strict=True) for run in (*words(join), *name)
    )


def _table(rows: Sequence[Pair]) -> Table:
    return Table(
        (*columns("scheme"), *COLUMNS),
        tuple(Row((cell(row.scheme), *_cells(row))) for row in rows),
    )


def _cells(row: Pair) -> tuple[Cell, ...]:
    return (
        name_cell(row.opponent),
        cell(spread(row.outright.interval)),
        cell(spread(row.difference.interval)),
        cell(percent(row.relative.interval) if row.relative else NOT_MEASURED),
        cell(sentences.soup_reading(row.outright, row.difference)),
    )
