"""Each soup beside its ingredients: which is better, and which loses less to quantization.

The two questions can have opposite answers, so both are in every row. Of several soups the best
is shown in full, the next ones folded, and the others in a row each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from qaudit.report import document as doc
from qaudit.report.format import listing, percent, plural, shown, spread
from qaudit.report.series import picture
from qaudit.report.views import SoupRow, View
from qaudit.types import AuditRecord, GreedySearch, Subject

SHOWN = 3
MEMBERS = 12
COLUMNS = doc.columns("against", "loss, nats", "lost, nats", "lost, % points", "the soup is")
LEGEND = (
    "Soup minus ingredient: negative favours the soup. `loss` is that of the quantized models, "
    "which decides what to ship; `lost` is what quantization added to it."
)
WORDS = {
    "a_better": "the soup has less",
    "b_better": "the ingredient has less",
    "equivalent": "the same",
    "inconclusive": "inconclusive",
}
"""What the verdict of a comparison with an ingredient means in a picture."""

MOST_MEMBERS = 6
"""Ingredients drawn in one row; of more, the best one alone."""


def soup_section(view: View) -> tuple[doc.Block, ...]:
    soups = [soup for soup in in_order(view) if view.against(soup)]
    if not soups:
        return ()
    parts = [doc.paragraph(LEGEND), *picture(view, "soups"), *_in_full(view, soups[0])]
    parts += [doc.fold(soup.label, *_in_full(view, soup)) for soup in soups[1:SHOWN]]
    return (*parts, *_in_short(view, soups[SHOWN:]))


def _in_full(view: View, soup: Subject) -> tuple[doc.Block, ...]:
    every = view.against(soup)
    best = [row for row in every if row.is_best]
    blocks: list[doc.Block] = [
        doc.paragraph(*_what(view, soup)),
        doc.paragraph(_summary(every, soup.label)),
        _table(best),
    ]
    if len(every) > len(best):
        blocks.append(doc.fold("Against every ingredient", _table(every)))
    return tuple(blocks)


def _in_short(view: View, soups: list[Subject]) -> tuple[doc.Block, ...]:
    """Give every other soup a row: against its best ingredient, at the scheme of the pick."""
    scheme = view.audit.pick.scheme if view.audit.pick else view.schemes[0]
    rows = tuple(
        doc.TableRow((doc.name_cell(soup.label), *_cells(row)))
        for soup in soups
        for row in view.against(soup)
        if row.is_best and row.scheme == scheme
    )
    title = f"{plural(len(rows), 'more soup')}, at {scheme} against the best ingredient"
    return (
        (doc.fold(title, doc.TableBlock((*doc.columns("soup"), *COLUMNS), rows)),) if rows else ()
    )


def _what(view: View, soup: Subject) -> list[doc.Inline]:
    made = (*doc.code(soup.label), *doc.words(f" is the {soup.merge or ''} of "))
    search = searches_of(view.audit).get(soup.label)
    recipe = (*made, *_ingredients(soup), *doc.words("."))
    return [recipe] if search is None else [recipe, doc.inline(_search_sentence(search))]


def _ingredients(soup: Subject) -> doc.Inline:
    alike = len({weight for _, weight in soup.members}) == 1
    names = [
        (*doc.words("" if alike else f"{weight:.3g} of "), *doc.code(c.label))
        for c, weight in soup.members
    ]
    more = len(names) - MEMBERS
    names = [*names[:MEMBERS], doc.words(f"{more} more")] if more > 0 else names
    joins = ["", *[", "] * (len(names) - 2), *[" and "] * (len(names) > 1)]
    return tuple(
        run for join, name in zip(joins, names, strict=True) for run in (*doc.words(join), *name)
    )


def _table(rows: Sequence[SoupRow]) -> doc.TableBlock:
    return doc.TableBlock(
        (*doc.columns("scheme"), *COLUMNS),
        tuple(doc.TableRow((doc.cell(row.scheme), *_cells(row))) for row in rows),
    )


def _cells(row: SoupRow) -> tuple[doc.Cell, ...]:
    return (
        doc.name_cell(row.opponent),
        doc.cell(spread(row.outright.interval)),
        doc.cell(spread(row.difference.interval)),
        doc.cell(shown(row.relative.interval if row.relative else None, percent)),
        doc.cell(soup_reading(row)),
    )


def in_order(view: View) -> tuple[Subject, ...]:
    pick = view.audit.pick

    def place(soup: Subject) -> tuple[bool, float]:
        score = view.score(soup.label, pick.scheme) if pick else None
        ce = score.ce.estimate if score else math.inf
        picked = pick is not None and soup.label == pick.subject
        return not picked, ce if math.isfinite(ce) else math.inf

    return tuple(sorted(view.soups, key=place))


def drawn(view: View) -> tuple[Subject, int, list[SoupRow]]:
    """Return the soup that is drawn, the number of its ingredients, and the rows of its picture."""
    soup = next(soup for soup in in_order(view) if view.against(soup))
    rows = view.against(soup)
    opponents = len({row.opponent for row in rows})
    return soup, opponents, [row for row in rows if row.is_best or opponents <= MOST_MEMBERS]


def soup_reading(row: SoupRow) -> str:
    better, loses = row.outright.verdict, row.difference.verdict
    readings = {
        ("a_better", "a_better"): "better, and loses less",
        ("a_better", "b_better"): "better, although it loses more",
        ("b_better", "a_better"): "worse, although it loses less",
        ("b_better", "b_better"): "worse, and loses more",
    }
    if (better, loses) in readings:
        return readings[better, loses]
    first = {"a_better": "better", "b_better": "worse", "equivalent": "as good"}
    second = {"a_better": "loses less", "b_better": "loses more", "equivalent": "loses as much"}
    if better == loses == "inconclusive":
        return "indistinguishable"
    word = first.get(better, "no detectable difference")
    return f"{word}; {second.get(loses, 'what it loses is inconclusive')}"


def disagree(row: SoupRow) -> bool:
    """Return whether the better model is the one that loses more."""
    return {row.outright.verdict, row.difference.verdict} == {"a_better", "b_better"}


def _summary(rows: Sequence[SoupRow], soup: str) -> str:
    schemes = dict.fromkeys(row.scheme for row in rows)
    outright = [(row, row.outright.verdict) for row in rows]
    lost = [(row, row.difference.verdict) for row in rows]
    text = (
        f"Over {plural(len(schemes), 'scheme')}, `{soup}` has a "
        f"{_counts('lower loss than', 'higher loss than', outright)} Quantization adds "
        f"{_counts('less to it than to', 'more to it than to', lost)}"
    )
    opposite = dict.fromkeys(row.scheme for row in rows if disagree(row))
    if opposite:
        text += f" The two questions have opposite answers under {listing(list(opposite))}."
    return text


def _counts(less: str, more: str, verdicts: Sequence[tuple[SoupRow, str]]) -> str:
    """Count the schemes under which the soup is ahead of every ingredient, and of the best."""
    by_scheme: dict[str, list[str]] = {}
    for row, verdict in verdicts:
        by_scheme.setdefault(row.scheme, []).append(verdict)
    every = sum(set(verdicts) == {"a_better"} for verdicts in by_scheme.values())
    best = [verdict for row, verdict in verdicts if row.is_best]
    return (
        f"{less} every ingredient under {every}, {less} the best one under "
        f"{best.count('a_better')}, and {more} the best one under {best.count('b_better')}."
    )


def searches_of(audit: AuditRecord) -> dict[str, GreedySearch]:
    return {search.label: search for search in audit.diagnostics.greedy}


def _search_sentence(search: GreedySearch) -> str:
    """Name the members in order, what each was worth, and the candidates left out."""
    first = search.candidates[0]
    members = [f"`{first.label}`"]
    refused: list[str] = []
    best = first.loss
    for trial in search.trials:
        if trial.taken and trial.loss is not None and best is not None:
            members.append(f"then `{trial.added}` improved it by {best - trial.loss:.4f}")
            best = trial.loss
        else:
            refused.append(f"`{trial.added}`")
    tried = {first.label, *(trial.added for trial in search.trials)}
    broken = [f"`{c.label}`" for c in search.candidates if c.label not in tried]
    text = (
        f"A greedy search at {search.scheme}, on the {plural(search.documents, 'document')} to "
        f"choose on, took {len(search.members)} of {len(search.candidates)}: "
        f"{', '.join(members)} nats per token"
    )
    if refused:
        text += f"; {listing(refused)} did not"
    if broken:
        text += f"; {listing(broken)} {'has' if len(broken) == 1 else 'have'} no finite loss"
    return f"{text}."
