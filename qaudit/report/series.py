"""The course of a series, and its soups beside their ingredients.

Where no picture is shown, a line of text for each scheme replaces it. Each line has its own scale:
its lowest error is the lowest block, its highest the full one, and both follow it as numbers. A
long series is drawn in as many equal parts as there is room for, each by the mean of its
checkpoints. A part in which nothing was measured is `-`.

Of a soup: which is better, and which loses less to quantization. The two questions can have
opposite answers, so both are in every row. Of several soups the best is shown, the others folded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from qaudit.diagnostics.diagnostic import parts
from qaudit.report import document as doc
from qaudit.report.format import (
    BLOCKS,
    NOT_MEASURED,
    listing,
    padded,
    percent,
    plural,
    printable,
    shortened,
    spread,
    width_of,
)
from qaudit.report.views import SoupRow, View
from qaudit.types import GreedySearch, Subject

LONGEST_NAME, LONGEST_LABEL, LONGEST_LINE = 24, 36, 30


def pictures(view: View) -> list[tuple[str, str]]:
    """Return the name and the description of every picture that can be drawn."""
    names = []
    if len(view.checkpoints) > 1 and view.schemes:
        names.append(("trajectory", "Relative quantization error along the series"))
        if any(row.accuracy_drop for row in view.audit.tasks):
            names.append(("accuracy", "Accuracy on tasks lost to quantization along the series"))
    if len(view.subjects) > 1 and view.schemes:
        names.append(("quantized", "Quantized loss against full-precision loss"))
    if any(view.against(soup) for soup in view.soups):
        names.append(("soups", "Soup minus ingredient, with intervals, under each scheme"))
    if len(view.subjects) > 1 and len(view.schemes) > 1:
        names.append(("pareto", "Loss of the best subject against bits per weight"))
    names += [(figure.name, figure.alt) for figure in parts("FIGURE") if figure.is_drawn(view)]
    return names


# --------------------------------------------------------------------- lines of text


def sparkline(values: Sequence[float | None], blocks: str = BLOCKS) -> str:
    """Draw numbers as blocks; what is missing or not finite is `-`."""
    finite = _finite(values)
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    line = ""
    for value in values:
        if value is None or not math.isfinite(value):
            line += NOT_MEASURED
            continue
        # Equal numbers are halfway up: they are neither low nor high.
        share = (value - low) / (high - low) if high > low else 0.5
        line += blocks[min(len(blocks) - 1, int(share * len(blocks)))]
    return line


def sparklines(view: View) -> list[str]:
    """Return a line for each scheme with two measured checkpoints, and what they show before."""
    main = view.axis.trunk
    count = min(len(main), LONGEST_LINE)
    edges = [len(main) * k // count for k in range(count + 1)] if main else []
    drawn: list[tuple[str, str, str]] = []
    for scheme in view.schemes:
        errors = [view.error(subject.label, scheme) for subject in main]
        finite = [e for e in errors if e is not None and math.isfinite(e.estimate)]
        if len(finite) > 1:
            values = [None if e is None else e.estimate for e in errors]
            parts = [_finite(values[a:b]) for a, b in pairwise(edges)]
            line = sparkline([sum(part) / len(part) if part else None for part in parts])
            ends = (choose(finite, key=lambda e: e.estimate) for choose in (min, max))
            span = " to ".join(percent(end, bounds=False) for end in ends)
            drawn.append((shortened(printable(scheme), LONGEST_NAME), line, span))
    if not drawn:
        return []
    wide = max(width_of(name) for name, _, _ in drawn)
    first, last = (shortened(printable(s.label), LONGEST_LABEL) for s in (main[0], main[-1]))
    head = f"Along the series, {first} to {last}, each line on its own scale, in %:"
    return [head, *(f"{padded(name, wide)}  {line}  {ends}" for name, line, ends in drawn)]


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


# --------------------------------------------------------------------- the section


def series_section(view: View) -> tuple[doc.Block, ...]:
    """Return under which schemes the added loss moved over the last stage, and show it.

    A series that ends in several ingredients has several ends, of which none speaks for all.
    """
    shown, start = picture(view, "quantized"), view.stage_end
    if start is None:
        return shown
    schemes: dict[str, list[str]] = {}
    for scheme in view.schemes:
        pairs = ((end.label, start.label) for end in view.ends)
        changes = [view.compared("relative_error_difference", scheme, *pair) for pair in pairs]
        verdicts = [change.verdict for change in changes if change is not None]
        counts = {"grew": verdicts.count("b_better"), "shrank": verdicts.count("a_better")}
        of = "" if len(verdicts) == 1 else f" of {len(verdicts)}"
        moved = [f"{word}{of and f' to {count}{of}'}" for word, count in counts.items() if count]
        if verdicts:
            words = " and ".join(moved) or "shows no detectable change"
            schemes.setdefault(words, []).append(scheme)
    if not schemes:
        return shown
    ends = listing([f"`{end.label}`" for end in view.ends])
    parts = [f"{words} under {listing(schemes[words])}" for words in sorted(schemes)]
    moved_as = f"From `{start.label}` to {ends}, the added loss {'; it '.join(parts)}."
    return doc.paragraph(moved_as), *shown


def series_picture(view: View) -> tuple[doc.Block, ...]:
    """Return the error along the series, as a picture or as lines."""
    lines = tuple(sparklines(view))
    bare: tuple[doc.Block, ...] = (doc.CodeBlock("\n".join(lines)),) if lines else ()
    return picture(view, "trajectory", lines) or bare


def picture(view: View, name: str, lines: tuple[str, ...] = ()) -> tuple[doc.Block, ...]:
    """Return a figure, if it can be drawn."""
    alt = dict(pictures(view)).get(name)
    return () if alt is None else (doc.Figure(name, alt, lines=lines),)


MOST_NAMED = 12
SOUP_COLUMNS: doc.Columns[SoupRow] = {
    "scheme": lambda row: row.scheme,
    "against": lambda row: doc.name_cell(row.opponent),
    "loss, nats": lambda row: spread(row.outright.interval),
    "lost, nats": lambda row: spread(row.difference.interval),
    "lost, % points": lambda row: percent(row.relative.interval) if row.relative else "-",
    "the soup is": lambda row: soup_reading(row),
}
SOUP_LEGEND = (
    "Soup minus ingredient: negative favours the soup. `loss` is that of the quantized models, "
    "which decides what to ship; `lost` is what quantization added to it."
)
MEANINGS = {
    "a_better": "the soup has less",
    "b_better": "the ingredient has less",
    "equivalent": "the same",
    "inconclusive": "inconclusive",
}
"""What the verdict of a comparison with an ingredient means in a picture."""

MOST_DRAWN = 6
"""Ingredients drawn in one row; of more, the best one alone."""


def soup_section(view: View) -> tuple[doc.Block, ...]:
    soups = [soup for soup in soups_in_order(view) if view.against(soup)]
    if not soups:
        return ()
    first, *others = soups
    blocks = [doc.paragraph(SOUP_LEGEND), *picture(view, "soups"), *_soup(view, first)]
    every = view.against(first)
    if not all(row.is_best for row in every):
        blocks.append(doc.fold("Against every ingredient", doc.table_of(every, SOUP_COLUMNS)))
    return (*blocks, *(doc.fold(soup.label, *_soup(view, soup)) for soup in others))


def _soup(view: View, soup: Subject) -> list[doc.Block]:
    searches = [s for s in view.audit.diagnostics.greedy if s.label == soup.label]
    alike = len({weight for _, weight in soup.members}) == 1
    names = [
        (*doc.words("" if alike else f"{weight:.3g} of "), *doc.code(c.label))
        for c, weight in soup.members
    ]
    more = len(names) - MOST_NAMED
    names = [*names[:MOST_NAMED], doc.words(f"{more} more")] if more > 0 else names
    made = list(doc.prose(f"`{soup.label}` is the {soup.merge or ''} of "))
    for k, name in enumerate(names):
        made += doc.words("" if k == 0 else ", " if k < len(names) - 1 else " and ")
        made += name
    rows = view.against(soup)
    return [
        doc.paragraph((*made, *doc.words(".")), *map(_search_sentence, searches[-1:])),
        doc.paragraph(_soup_summary(rows, soup.label)),
        doc.table_of((row for row in rows if row.is_best), SOUP_COLUMNS),
    ]


def soups_in_order(view: View) -> tuple[Subject, ...]:
    """Return the soups, what ships first, then by their loss under its scheme."""
    main = view.main

    def place(soup: Subject) -> tuple[bool, float]:
        score = view.score(soup.label, main.scheme) if main and main.scheme else None
        ce = score.ce.estimate if score else math.inf
        return main is None or soup.label != main.subject, ce if math.isfinite(ce) else math.inf

    return tuple(sorted(view.soups, key=place))


def drawn_soup(view: View) -> tuple[Subject, int, list[SoupRow]]:
    """Return the soup that is drawn, the number of its ingredients, and the rows of its picture."""
    soup = next(soup for soup in soups_in_order(view) if view.against(soup))
    rows = view.against(soup)
    opponents = len({row.opponent for row in rows})
    return soup, opponents, [row for row in rows if row.is_best or opponents <= MOST_DRAWN]


def soup_reading(row: SoupRow) -> str:
    better, loses = row.outright.verdict, row.difference.verdict
    decided = {"a_better": "better", "b_better": "worse", "equivalent": "as good"}
    losing = {"a_better": "loses less", "b_better": "loses more", "equivalent": "loses as much"}
    if better == loses == "inconclusive":
        return "indistinguishable"
    first = decided.get(better, "no detectable difference")
    second = losing.get(loses, "what it loses is inconclusive")
    if {better, loses} <= {"a_better", "b_better"}:
        return f"{first}, {'and' if better == loses else 'although it'} {second}"
    return f"{first}; {second}"


def disagree(row: SoupRow) -> bool:
    """Return whether the better model is the one that loses more."""
    return {row.outright.verdict, row.difference.verdict} == {"a_better", "b_better"}


def _soup_summary(rows: Sequence[SoupRow], soup: str) -> str:
    """Count the schemes under which the soup is ahead of every ingredient, and of the best."""
    schemes = list(dict.fromkeys(row.scheme for row in rows))

    def counts(which: str, less: str, more: str) -> str:
        every = [{getattr(r, which).verdict for r in rows if r.scheme == s} for s in schemes]
        best = [getattr(row, which).verdict for row in rows if row.is_best]
        return (
            f"{less} every ingredient under {every.count({'a_better'})}, {less} the best one under "
            f"{best.count('a_better')}, and {more} the best one under {best.count('b_better')}."
        )

    text = (
        f"Over {plural(len(schemes), 'scheme')}, `{soup}` has a "
        f"{counts('outright', 'lower loss than', 'higher loss than')} Quantization adds "
        f"{counts('difference', 'less to it than to', 'more to it than to')}"
    )
    opposite = [s for s in schemes if any(disagree(row) for row in rows if row.scheme == s)]
    if opposite:
        text += f" The two questions have opposite answers under {listing(opposite)}."
    return text


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
    where = f"{search.documents} further documents"
    if not search.further:
        where = f"the {plural(search.documents, 'document')} that judge it, where its trials count,"
    text = (
        f"A greedy search at {search.scheme}, on {where} took "
        f"{len(search.members)} of {len(search.candidates)}: "
        f"{', '.join(members)} nats per token"
    )
    if refused:
        text += f"; {listing(refused)} did not"
    if broken:
        text += f"; {listing(broken)} {'has' if len(broken) == 1 else 'have'} no finite loss"
    return f"{text}."
