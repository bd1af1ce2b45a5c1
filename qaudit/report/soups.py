"""Each soup beside its ingredients: which is better, and which loses less to quantization."""

from __future__ import annotations

from tabulate import tabulate

from qaudit.report import sentences
from qaudit.report.format import listing, percent, spread
from qaudit.report.markdown import cell, code, folded, plain, prose
from qaudit.report.searches import searches_of, sentence
from qaudit.report.views import View
from qaudit.types import Comparison, Subject

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


def soup_section(view: View) -> str:
    """Return the section on soups, empty where there are none."""
    parts = [part for soup in view.soups if (part := _soup(view, soup))]
    return "\n\n".join([LEGEND, *parts]) if parts else ""


def _soup(view: View, soup: Subject) -> str:
    opponents = view.opponents(soup.label)
    best_rows, every_row, summary = [], [], []
    for scheme in view.schemes:
        best = view.best(scheme, opponents)
        for opponent in opponents:
            pair = comparisons(view, scheme, soup.label, opponent)
            if pair is None:
                continue
            row = _row(view, scheme, opponent, pair)
            every_row.append(row)
            if opponent == best:
                best_rows.append(row)
                summary.append((scheme, *pair))
    if not summary:
        return ""
    lines = [
        _what(view, soup),
        prose(sentences.soup_summary(summary, soup.label)),
        _table(best_rows),
    ]
    if len(every_row) > len(best_rows):
        lines.append(folded("Against every ingredient", _table(every_row)))
    return "\n\n".join(lines)


def _what(view: View, soup: Subject) -> str:
    """Say what a soup is made of, and how that was found where it was searched for."""
    text = f"{code(soup.label)} is the {plain(soup.merge or '')} of {_ingredients(soup)}."
    search = searches_of(view.audit).get(soup.label)
    return text if search is None else f"{text} {prose(sentence(search))}"


def _ingredients(soup: Subject) -> str:
    if len({weight for _, weight in soup.members}) == 1:
        return listing([code(c.label) for c, _ in soup.members])
    return listing([f"{weight:.3g} of {code(c.label)}" for c, weight in soup.members])


def comparisons(view: View, scheme: str, a: str, b: str) -> tuple[Comparison, Comparison] | None:
    """Return the outright comparison and the difference of differences of a pair."""
    outright = view.compared("outright", scheme, a, b)
    difference = view.compared("difference_of_differences", scheme, a, b)
    return None if outright is None or difference is None else (outright, difference)


def _row(view: View, scheme: str, opponent: str, pair: tuple[Comparison, Comparison]) -> list[str]:
    outright, difference = pair
    relative = view.compared("relative_error_difference", scheme, outright.a, opponent)
    points = percent(relative.interval) if relative else "-"
    return [
        plain(scheme),
        cell(opponent),
        spread(outright.interval),
        spread(difference.interval),
        points,
        sentences.soup_reading(outright, difference),
    ]


def _table(rows: list[list[str]]) -> str:
    return tabulate(rows, HEADER, tablefmt="pipe", disable_numparse=True, stralign="left")
