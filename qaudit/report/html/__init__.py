"""A document as one page that needs nothing else.

Figures answer to a pointer and to the keyboard, tables can be sorted, long ones fold. Style and
script are files beside this one, written into the page; its policy names them by their hashes,
so that a browser loads nothing and runs nothing else, whatever a document contains. Without the
script everything can be read, and only the controls are missing.

Characters that are not ASCII are spelled, so that no encoding can be the wrong one.

Elements of HTML and SVG are made so that no text can become an element: `Html` is for a browser,
`str` is text of any origin; the type checker keeps them apart, and `text` is the only way from one
to the other.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import groupby, takewhile
from typing import NewType

from qaudit.report import document as doc
from qaudit.report.chart import on_page
from qaudit.report.format import printable

Html = NewType("Html", str)
Value = str | int | float | None

EMPTY = Html("")
_VOID = frozenset({"meta", "br"})


def text(words: str) -> Html:
    """Escape words and their control characters."""
    return Html(html.escape(printable(words)))


def element(tag: str, *inner: Html, **attributes: Value) -> Html:
    """Return an element; `class_` is written `class`, `data_x` is `data-x`, None is left out."""
    opened = tag
    for name, value in attributes.items():
        if value is not None:
            number = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
            opened += f' {name.rstrip("_").replace("_", "-")}="{text(str(number))}"'
    if tag in _VOID:
        return Html(f"<{opened}>")
    return Html(f"<{opened}>{''.join(inner)}</{tag}>")


def joined(parts: Iterable[Html], between: str = "") -> Html:
    return Html(between.join(parts))


FILE = "report.html"
NO_FIGURES: Mapping[str, str] = {}
FEWEST_ROWS = 3
"""A table with so many rows can be sorted, if all columns have a name."""


def render(document: doc.Page, figures: Mapping[str, str] = NO_FIGURES, footer: str = "") -> str:
    """Render a document with figures by their names, as they were saved in light colours."""
    lead = list(takewhile(lambda block: not isinstance(block, doc.Section), document.blocks))
    rest = document.blocks[len(lead) :]
    elements = Blocks(figures, document.is_folded)
    titles = [block.title for block in rest if isinstance(block, doc.Section)]
    links = [element("li", element("a", text(t), href=f"#{place_of(t)}")) for t in titles]
    contents = element("nav", element("ul", *links), aria_label="Contents")
    body = element(
        "body",
        element("a", text("Skip to the verdict"), class_="skip", href="#verdict"),
        element(
            "header",
            element("h1", text(document.title)),
            element("p", line(document.headline), class_="verdict", id="verdict", tabindex=-1),
            elements.all(lead, document.title),
        ),
        contents if titles else EMPTY,
        element("main", elements.all(rest, document.title), id="main"),
        element("footer", element("p", text(f"{footer}This page loads nothing from anywhere."))),
        element("script", _file("page.js")),
    )
    whole = f"<!DOCTYPE html>\n{element('html', _head(document.title), body, lang='en')}\n"
    return whole.encode("ascii", "xmlcharrefreplace").decode()


@cache
def _file(name: str) -> Html:
    return Html(resources.files(__name__).joinpath(name).read_text(encoding="ascii"))


def _hash(name: str) -> str:
    digest = hashlib.sha256(_file(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _head(title: str) -> Html:
    policy = (
        f"default-src 'none'; style-src {_hash('page.css')}; script-src {_hash('page.js')}; "
        "base-uri 'none'; form-action 'none'"
    )
    size = "width=device-width, initial-scale=1"
    return element(
        "head",
        element("meta", charset="utf-8"),
        # Apostrophes need no spelling inside of quotes, and people read this line.
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        element("meta", name="viewport", content=size),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", text(title)),
        element("style", _file("page.css")),
    )


@dataclass(frozen=True)
class Blocks:
    """Blocks to elements; tables are called by their section where they have no caption."""

    figures: Mapping[str, str]
    is_folded: bool = False

    def all(self, blocks: Sequence[doc.Block], title: str, level: int = 2) -> Html:
        return joined((self.block(block, title, level) for block in blocks), "\n")

    def block(self, block: doc.Block, title: str, level: int = 2) -> Html:
        match block:
            case doc.Section():
                place = place_of(block.title)
                heading = element(f"h{level}", text(block.title), id=f"{place}-title")
                body = self.all(block.blocks, block.title, level + 1)
                inner = [heading, body]
                if self.is_folded and level == 2:  # a link to it opens it
                    inner = [element("details", element("summary", heading), body)]
                return element("section", *inner, id=place, aria_labelledby=f"{place}-title")
            case doc.FoldBlock():
                summary = element("summary", text(block.summary))
                body = self.all(block.blocks, f"{title}: {block.summary}", level)
                return element("details", summary, body)
            case doc.Paragraph():
                return element("p", line(block.runs))
            case doc.Lines():
                return element("p", joined(map(line, block.lines), element("br")))
            case doc.List():
                return element("ul", *(element("li", line(item)) for item in block.items))
            case doc.CodeBlock():
                return _lines(block.text.split("\n"), is_command=block.language == "sh")
            case doc.Figure():
                if svg := on_page(self.figures.get(block.name, ""), block.alt):
                    how = {"role": "group", "aria_label": f"Figure: {block.alt}"}
                    plot = element("div", Html(svg), class_="plot", tabindex=0, **how)
                    return element("figure", plot, class_="chart", id=f"figure-{block.name}")
                note = element("p", text(f"{block.alt}: no picture was drawn."), class_="note")
                return joined([note, _lines(block.lines)]) if block.lines else note
            case doc.TableBlock():
                return _table(block, block.caption or title)


def place_of(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def line(runs: doc.Inline) -> Html:
    parts = []
    for (is_strong, is_emphasis), group in groupby(runs, lambda r: (r.strong, r.emphasis)):
        inner = EMPTY
        for run in group:
            shown = element("code", text(run.text)) if run.code else text(run.text)
            inner = joined([inner, element("a", shown, href=run.href) if run.href else shown])
        inner = element("em", inner) if is_emphasis else inner
        parts.append(element("strong", inner) if is_strong else inner)
    return joined(parts)


def _lines(lines: Sequence[str], *, is_command: bool = False) -> Html:
    escaped = joined(map(text, lines), "\n")
    kind = "command" if is_command else None
    return element("pre", element("code", escaped), class_=kind, tabindex=0)


def _table(table: doc.TableBlock, caption: str) -> Html:
    """Return a table inside of what can be scrolled, by the keyboard as well."""
    has_head = any(table.columns)
    is_sortable = all(table.columns[1:]) and has_head and len(table.rows) >= FEWEST_ROWS
    names = (
        element("th", text(name), scope="col") if name else element("td") for name in table.columns
    )
    inner = element(
        "table",
        element("caption", text(caption), class_="unseen"),
        element("thead", element("tr", *names)) if has_head else EMPTY,
        element("tbody", joined(_rows(table), "\n")),
        class_="sortable" if is_sortable else None,
        id=table.name or None,
    )
    return element("div", inner, class_="scroll", tabindex=0, role="group", aria_label=caption)


def _rows(table: doc.TableBlock) -> Iterator[Html]:
    for row in table.rows:
        first, *cells = row.cells
        yield element(
            "tr",
            element("th", *_content(first), scope="row", data_value=_exact(first.value)),
            *(element("td", *_content(c), data_value=_exact(c.value)) for c in cells),
            class_=" ".join(["more"] * row.minor + ["chosen"] * row.chosen) or None,
        )


def _content(cell: doc.Cell) -> list[Html]:
    inner = [line(cell.runs)]
    if doc.plain_text(cell.runs) == "-":  # for screen readers alone
        inner.append(element("span", text(" not measured"), class_="unseen"))
    if cell.small:
        inner += [text(" "), element("span", text(cell.small), class_="interval")]
    return inner


def _exact(value: float | None) -> str | None:
    return f"{value:.9g}" if value is not None and math.isfinite(value) else None
