"""A document as Markdown, and the card inside a README; names of others stay names.

Revision names, notes and reasons come from repositories and files; none of them may open a
tag, end a table cell, start a link or imitate the markers around the card.

Inside a README the block between two markers is replaced, all else is kept. A marker counts where
it has a line of its own and is not part of an example in code, by the rules of CommonMark. Where
there is anything but no block or one whole block, the README is refused: replacing the wrong half
of it cannot be undone.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from urllib.parse import quote

from qaudit.errors import UsageError
from qaudit.report import document as doc
from qaudit.report.format import inert, printable

LONGEST_NAME = 255
TOP = 3
"""The level of a section's heading."""

LEFT_OUT = "Left out for length, see `audit.json`"
_NUMBERED = re.compile(r"^(\s*\d{1,9})([.)])(?=\s|$)")
_ACTIVE = re.compile(r"[\\`*_|~]|(?<=\])[(:]")
_AT_START = re.compile(r"^\s*(?:[-+](?!\d)|[#>])")


def render(
    document: doc.Page,
    *,
    pictures_at: str | None = None,
    has_dark: bool = False,
    limit_nbytes: int | None = None,
    left_out_as: str = LEFT_OUT,
) -> str:
    """Render a document; `has_dark`: every picture has a variant for dark pages.

    Without a place for pictures, lines of text replace them. A table that ends in its middle
    looks like a short one, so where the text is too long, whole sections are left out and named.
    """
    renderer = _Renderer(pictures_at, has_dark, document.is_folded)
    parts = [(block, "\n\n".join(filter(None, renderer.block(block)))) for block in document.blocks]
    head = [f"## {_escaped(document.title)}", f"**{_runs(document.headline)}**"]
    left_out: list[str] = []

    def text() -> str:
        end = f"{_runs(doc.prose(left_out_as))}: {', '.join(map(_escaped, left_out))}."
        pieces = [*head, *(rendered for _, rendered in parts if rendered), *[end] * bool(left_out)]
        return "\n\n".join(pieces) + "\n"

    while limit_nbytes is not None and len(text().encode()) > limit_nbytes:
        sections = [(b, rendered) for b, rendered in parts if isinstance(b, doc.Section)]
        if not sections:
            break
        section, rendered = max(sections, key=lambda part: (part[0].expendable, len(part[1])))
        parts.remove((section, rendered))
        left_out.append(section.title)
    return inert(text())


def render_blocks(blocks: Sequence[doc.Block], level: int = TOP) -> str:
    """Render blocks without pictures; sections among them have headings of a level."""
    renderer = _Renderer(pictures_at=None, has_dark=False)
    return "\n\n".join(renderer.blocks(blocks, level))


@dataclass(frozen=True)
class _Renderer:
    pictures_at: str | None
    has_dark: bool
    is_folded: bool = False

    def blocks(self, blocks: Sequence[doc.Block], level: int) -> Iterator[str]:
        for block in blocks:
            yield from filter(None, self.block(block, level))

    def block(self, block: doc.Block, level: int = TOP) -> Iterator[str]:
        match block:
            case doc.Section() if self.is_folded and level == TOP:
                yield from self.block(doc.FoldBlock(block.title, block.blocks), level + 1)
            case doc.Section():
                inner = list(self.blocks(block.blocks, level + 1))
                yield from [f"{'#' * level} {_escaped(block.title)}", *inner] if inner else []
            case doc.FoldBlock():
                yield f"<details><summary>{_html(block.summary)}</summary>"
                yield from self.blocks(block.blocks, level)
                yield "</details>"
            case doc.Paragraph():
                yield _runs(block.runs)
            case doc.Lines():
                yield "<br>\n".join(map(_runs, block.lines))
            case doc.List():
                yield "\n".join(f"- {_runs(item)}" for item in block.items)
            case doc.CodeBlock():
                yield _fenced(block)
            case doc.Figure():
                yield self.figure(block)
            case doc.TableBlock():
                yield _table(block)

    def figure(self, figure: doc.Figure) -> str:
        """Link a picture, for pages in the dark another one; or show its lines."""
        if self.pictures_at is None:
            return _fenced(doc.CodeBlock("\n".join(figure.lines))) if figure.lines else ""
        place = quote(f"{self.pictures_at}/{figure.name}")
        if not self.has_dark:
            return f"![{_escaped(figure.alt)}]({place}.svg)"
        return (
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{place}-dark.svg">'
            f'<img alt="{_html(figure.alt)}" src="{place}.svg"></picture>'
        )


def _table(table: doc.TableBlock) -> str:
    """Return a table without the spaces that align it: they are a third of a long card."""
    rules = "|".join("--:" if is_right else ":--" for is_right in table.are_numbers)
    lines = [f"| {' | '.join(map(_escaped, table.columns))} |", f"|{rules}|"]
    for row in table.rows:
        cells = []
        for cell in row.cells:
            text = _runs(cell.runs, in_table=True)
            # No space inside an interval: a narrow column would break it over two lines.
            small = _escaped_inside(cell.small).replace(" ", "&nbsp;")
            cells.append(f"{text}<br><sub>{small}</sub>" if small else text)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _runs(runs: doc.Inline, *, in_table: bool = False) -> str:
    """Show runs; text of one kind is escaped as a whole, for `[a]` and `(b)` make a link."""
    show_text = _escaped_inside if in_table else _escaped
    parts = []
    for (is_strong, is_emphasis), group in groupby(runs, lambda run: (run.strong, run.emphasis)):
        text = ""
        for (is_code, href), same in groupby(group, lambda run: (run.code, run.href)):
            whole = "".join(run.text for run in same)
            escaped = _code(whole, in_table=in_table) if is_code else show_text(whole)
            text += f"[{escaped}]({quote(href, safe=':/#?=&@')})" if href else escaped
        text = f"*{text}*" if is_emphasis else text
        parts.append(f"**{text}**" if is_strong else text)
    return "".join(parts)


def _fenced(block: doc.CodeBlock) -> str:
    """Return lines between fences longer than any in them."""
    lines = [printable(line) for line in block.text.split("\n")]
    longest = max((len(run) for run in re.findall("`+", block.text)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{block.language}", *lines, fence])


def _html(text: str) -> str:
    """Show text inside HTML, where Markdown is not read."""
    return html.escape(printable(text))


def _code(name: str, *, in_table: bool = False) -> str:
    """Show a name as code; of a name without end, both ends.

    A bar ends a cell even in code, and readers disagree on a backslash before it: in a table, names
    with either are spelled in entities, on which all readers agree.
    """
    safe = printable(name).replace("`", "'").replace("<!--", "<! --").strip()
    if len(safe) > LONGEST_NAME:
        safe = f"{safe[: LONGEST_NAME // 2]}..{safe[-LONGEST_NAME // 2 :]}"
    if in_table and set(safe) & set("|\\"):
        return f"<code>{re.sub(r'[^A-Za-z0-9 ]', lambda m: f'&#{ord(m[0])};', safe)}</code>"
    return f"`{safe or '?'}`"


def _escaped(text: str) -> str:
    return _NUMBERED.sub(r"\1\\\2", _AT_START.sub(r"\\\g<0>", _escaped_inside(text)))


def _escaped_inside(text: str) -> str:
    """Show text that is not at the beginning of a line."""
    safe = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return _ACTIVE.sub(r"\\\g<0>", safe)


BEGIN, END = "<!-- qaudit:begin -->", "<!-- qaudit:end -->"
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


def put_block(text: str, card: str) -> str:
    """Return a README with the card in place of the one it has, or at its end.

    Line endings are those of the README; nothing outside of the markers is touched.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    block = card.rstrip("\r\n").replace("\r\n", "\n").replace("\n", newline)
    marked = list(_marked(text))
    if [marker for marker, _, _, _ in marked] == [BEGIN, END]:
        return text[: marked[0][2]] + block + text[marked[1][3] :]
    if marked:
        places = ", ".join(f"`{marker[5:-4]}` in line {line}" for marker, line, _, _ in marked)
        raise UsageError(
            f"the markers of the card do not enclose one block: {places}",
            hint=f"leave one `{BEGIN}` and one `{END}` after it, or none, and try again",
        )
    if not text.strip("\ufeff"):
        return f"{text}{block}{newline}"
    gap = newline if text.endswith("\n") else newline * 2
    result = f"{text}{gap}{block}{newline}"
    if [marker for marker, _, _, _ in _marked(result)] != [BEGIN, END]:
        raise UsageError(
            "the README ends inside of a code block that is never closed, and so would the card",
            hint="close it, with a line of ``` or ~~~ like the one that opens it, and try again",
        )
    return result


def _marked(text: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield the markers in HTML: which, its line, where it begins and ends."""
    if BEGIN not in text and END not in text:
        return
    from markdown_it import MarkdownIt  # takes longer to load than a small audit to render

    bom = len(text) - len(text.removeprefix("\ufeff"))
    lines = list(_LINE.finditer(text, bom))
    for token in MarkdownIt("commonmark").parse(text[bom:]):
        if token.type != "html_block" or token.map is None:
            continue
        for number in range(token.map[0], min(token.map[1], len(lines))):
            bare = lines[number][0].strip()
            if bare in (BEGIN, END):
                start = lines[number].start() + lines[number][0].index(bare)
                yield bare, number + 1, start, start + len(bare)
