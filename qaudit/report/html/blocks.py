"""The blocks of a document as elements of a page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from qaudit.report.document import (
    Block,
    Cell,
    Code,
    Figure,
    Fold,
    Inline,
    List,
    Mark,
    Paragraph,
    Run,
    Section,
    Table,
    plain_text,
)
from qaudit.report.elements import EMPTY, Html, element, joined, text, unseen

UNBROKEN = {
    re.compile(r"(?<=\d) %"): "\N{NO-BREAK SPACE}%",
    re.compile(r" \[(?=-?[\d.in])"): "\N{NO-BREAK SPACE}[",
    re.compile(r"\[(-?[\w.]+), (-?[\w.]+)\]"): "[\\1,\N{NO-BREAK SPACE}\\2]",
}
FEWEST_ROWS = 3
"""A table with so many rows can be sorted."""


@dataclass(frozen=True)
class Blocks:
    """Blocks to elements; tables are called by their section where they have no caption."""

    figures: Mapping[str, Html]

    def all(self, blocks: Sequence[Block], title: str, level: int = 2) -> Html:
        """Return blocks in order."""
        return joined((self.block(block, title, level) for block in blocks), "\n")

    def block(self, block: Block, title: str, level: int = 2) -> Html:
        """Return one block."""
        match block:
            case Section():
                return self._section(block, level)
            case Fold():
                summary = element("summary", text(block.summary))
                inner = self.all(block.blocks, f"{title}: {block.summary}", level)
                return element("details", summary, inner, open="" if block.is_open else None)
            case Paragraph():
                return element("p", line(block.runs))
            case List():
                return element("ul", *(element("li", line(item)) for item in block.items))
            case Code():
                return _lines(block.text.split("\n"), is_command=block.language == "sh")
            case Figure():
                return self._figure(block)
            case Table():
                return joined([_legend(block), _table(block, block.caption or title)])

    def _section(self, section: Section, level: int) -> Html:
        place = place_of(section.title)
        heading = element(f"h{level}", text(section.title), id=f"{place}-title")
        body = self.all(section.blocks, section.title, level + 1)
        return element("section", heading, body, id=place, aria_labelledby=f"{place}-title")

    def _figure(self, figure: Figure) -> Html:
        """Return a drawing; of a figure that has none, its lines."""
        if figure.name in self.figures:
            return self.figures[figure.name]
        alt = element("p", text(figure.alt), class_="note")
        return joined([alt, _lines(figure.lines)]) if figure.lines else alt


def place_of(title: str) -> str:
    """Return what a section is called in links."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


# --------------------------------------------------------------------- lines


def line(runs: Inline) -> Html:
    """Return runs of text."""
    parts = []
    for (is_strong, is_emphasis), group in groupby(runs, lambda r: (r.strong, r.emphasis)):
        inner = joined(map(_run, group))
        inner = element("em", inner) if is_emphasis else inner
        parts.append(element("strong", inner) if is_strong else inner)
    return joined(parts)


def _run(run: Run) -> Html:
    shown = element("code", text(run.text)) if run.code else _unbroken(run.text)
    return element("a", shown, href=run.href) if run.href else shown


def _unbroken(words: str) -> Html:
    """Show text; keep a number and its unit, and an interval, on one line."""
    shown = text(words)
    for pattern, joined_up in UNBROKEN.items():
        shown = Html(pattern.sub(joined_up, shown))
    return shown


def _lines(lines: Sequence[str], *, is_command: bool = False) -> Html:
    shown = joined(map(text, lines), "\n")
    kind = "command" if is_command else None
    return element("pre", element("code", shown), class_=kind, tabindex=0)


# --------------------------------------------------------------------- tables


def _legend(table: Table) -> Html:
    parts = []
    if table.strong:
        parts += [element("strong", text("Bold")), text(f": {table.strong}. ")]
    for mark in table.marks:
        parts += [_sign(mark, is_read=True), text(f" {mark.meaning}. ")]
    return element("p", *parts) if parts else EMPTY


def _table(table: Table, caption: str) -> Html:
    """Return a table inside of what can be scrolled, by the keyboard as well."""
    has_head = any(column.name for column in table.columns)
    head = element("tr", *(_head(column.name) for column in table.columns))
    shown = element(
        "table",
        element("caption", text(caption), class_="unseen"),
        element("thead", head) if has_head else EMPTY,
        element("tbody", joined(_rows(table), "\n")),
        class_="sortable" if has_head and len(table.rows) >= FEWEST_ROWS else None,
        id=table.name or None,
    )
    return element("div", shown, class_="scroll", tabindex=0, role="group", aria_label=caption)


def _head(name: str) -> Html:
    return element("th", text(name), scope="col") if name else element("td")


def _rows(table: Table) -> Iterator[Html]:
    for row in table.rows:
        first, *others = row.cells
        yield element(
            "tr",
            element("th", line(first.runs), scope="row", data_value=_exact(first.value)),
            *(_cell(cell, table) for cell in others),
            class_="more" if row.minor else None,
        )


def _cell(cell: Cell, table: Table) -> Html:
    shown = line(cell.runs)
    inner = [element("strong", shown) if cell.strong else shown]
    inner += [unseen(f", {table.strong}")] if cell.strong and table.strong else []
    inner += [unseen(" not measured")] if plain_text(cell.runs) == "-" else []
    inner += [_sign(cell.mark)] if cell.mark else []
    if cell.small:
        inner += [text(" "), element("span", _unbroken(cell.small), class_="interval")]
    return element("td", *inner, data_value=_exact(cell.value))


def _sign(mark: Mark, *, is_read: bool = False) -> Html:
    sign = element("span", text(mark.sign), aria_hidden="true")
    meaning = EMPTY if is_read else unseen(f", {mark.meaning}")
    return element("span", sign, meaning, class_=f"mark {mark.kind}".strip(), title=mark.meaning)


def _exact(value: float | None) -> str | None:
    return f"{value:.9g}" if value is not None and math.isfinite(value) else None
