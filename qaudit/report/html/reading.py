"""The card's sections as HTML: its Markdown, read by a Markdown reader.

The page says what the card says because it is made of the card: nothing is worded twice. The
reader knows only what the card uses; of HTML inside it, only the few tags that the card writes
pass, and all else is shown as text. Tables get what Markdown cannot say: a caption and heads of
their rows. A picture is replaced by the figure of its name.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from qaudit.report.elements import Html, element, joined, text

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

BLOCKS = ("table", "fence", "html_block", "list", "paragraph")
INSIDE = ("newline", "escape", "backticks", "emphasis", "image", "html_inline", "entity")
"""What the card writes. All else, links above all, stays text."""

SUMMARY = re.compile(r"\s*<details><summary>([^<>]*)</summary>\s*")
TAGS = frozenset({"<br>", "<sub>", "</sub>", "<code>", "</code>"})
PERCENT = re.compile(r"(?<=\d) %")
INTERVAL = re.compile(r" \[(-?[\w.]+), (-?[\w.]+)\]")
UNBROKEN = "\N{NO-BREAK SPACE}[\\1,\N{NO-BREAK SPACE}\\2]"
FEWEST_ROWS = 3
"""A table with so many rows can be sorted."""


@cache
def _reader() -> MarkdownIt:
    from markdown_it import MarkdownIt  # takes longer to load than a small audit to render

    reader = MarkdownIt("zero", {"html": True})
    reader.enable([*BLOCKS, *INSIDE])
    shown = {"html_inline": _inline, "html_block": _block, "fence": _fence, "text": _text}
    for name, show in shown.items():
        reader.add_render_rule(name, _rule(show))
    return reader


def words(markdown: str) -> Html:
    """Read a sentence."""
    return Html(_reader().renderInline(markdown))


def page_part(markdown: str, caption: str, figures: Mapping[str, Html]) -> Html:
    """Read a section; its tables are called by `caption`, or by what they are folded under."""
    reader = _reader()
    tokens = reader.parse(markdown)
    shown = list(_adjusted(tokens, caption, figures))
    return Html(reader.renderer.render(shown, reader.options, {}))


def _rule(show: Callable[[Token], str]) -> Callable[..., str]:
    """Return a way to show a token as the reader calls it."""

    def shown(self: object, tokens: Sequence[Token], k: int, *_: object) -> str:
        return show(tokens[k])

    return shown


def _inline(token: Token) -> str:
    return token.content if token.content in TAGS else text(token.content)


def _text(token: Token) -> str:
    """Show words, numbers among them on one line."""
    joined_up = PERCENT.sub("\N{NO-BREAK SPACE}%", INTERVAL.sub(UNBROKEN, token.content))
    return html.escape(joined_up, quote=False)


def _block(token: Token) -> str:
    """Let through what is ours, marked so by `_adjusted`, and what folds."""
    if token.meta.get("ours") or SUMMARY.fullmatch(token.content):
        return token.content
    return "</details>\n" if token.content.strip() == "</details>" else text(token.content)


def _fence(token: Token) -> str:
    lines = joined((text(line) for line in token.content.rstrip("\n").split("\n")), "\n")
    kind = "command" if token.info == "sh" else None
    return element("pre", element("code", lines), class_=kind, tabindex=0)


def _adjusted(tokens: Sequence[Token], caption: str, figures: Mapping[str, Html]) -> list[Token]:
    """Return the tokens with figures for pictures, and tables as a page has them."""
    found: list[Token] = []
    title = caption
    k = 0
    while k < len(tokens):
        token = tokens[k]
        if token.type == "html_block":
            folds = SUMMARY.fullmatch(token.content)
            title = f"{caption}: {html.unescape(folds[1])}" if folds else caption
        if token.type == "paragraph_open" and (place := _picture(tokens[k + 1])) is not None:
            drawn = figures.get(PurePosixPath(place).stem)
            found.append(_ours(_elsewhere(tokens[k + 1], place) if drawn is None else drawn))
            k += 3
        elif token.type == "table_open":
            end = next(n for n in range(k, len(tokens)) if tokens[n].type == "table_close")
            found += _table(tokens[k : end + 1], title)
            k = end + 1
        else:
            found.append(token)
            k += 1
    return found


def _picture(token: Token) -> str | None:
    """Return where the picture lies that a paragraph is, if it is one."""
    inside = token.children or []
    if len(inside) != 1 or inside[0].type != "image":
        return None
    return str(inside[0].attrs["src"])


def _elsewhere(token: Token, place: str) -> Html:
    """Name a picture that the page has no figure for."""
    shown = element("code", text(place))
    return element("p", text(f"{token.content[2:].partition(']')[0]}: "), shown, class_="note")


def _ours(content: Html) -> Token:
    from markdown_it.token import Token

    return Token("html_block", "", 0, content=content, meta={"ours": True})


def _table(tokens: Sequence[Token], title: str) -> list[Token]:
    """Return a table with a caption and heads, inside of what it can be scrolled in."""
    middle = next(n for n, token in enumerate(tokens) if token.type == "thead_close")
    has_head = any(token.content for token in tokens[:middle] if token.type == "inline")
    rows = sum(token.type == "tr_open" for token in tokens[middle:])
    _name_cells(tokens)
    opening = _opening(title, sortable=has_head and rows >= FEWEST_ROWS)
    inside = tokens[1:-1] if has_head else tokens[middle + 1 : -1]
    return [_ours(opening), *inside, _ours(Html("</table></div>\n"))]


def _opening(title: str, *, sortable: bool) -> Html:
    """Open what a table stands in; whoever uses a keyboard can scroll it."""
    kind = ' class="sortable"' if sortable else ""
    caption = element("caption", text(title), class_="unseen")
    return Html(
        f'<div class="scroll" tabindex="0" role="group" aria-label="{text(title)}">'
        f"<table{kind}>{caption}\n"
    )


def _name_cells(tokens: Sequence[Token]) -> None:
    """Let the first cell of a row be its head; take styles away, which the page forbids."""
    first = head = False
    for token in tokens:
        token.attrs.pop("style", None)
        if token.type == "tr_open":
            first = True
        elif token.type == "th_open":
            token.attrs["scope"] = "col"
            first = False
        elif token.type == "td_open" and first:
            token.tag, token.attrs["scope"] = "th", "row"
            first, head = False, True
        elif token.type == "td_close" and head:
            token.tag, head = "th", False
