"""A document as plain text, in 80 columns or as many as the terminal has.

Without colour: what matters is written in words and marks. Widths are counted in columns of the
terminal, so that names in any script keep a table straight. A table leaves out its intervals
where they do not fit, and goes on in a second table where its columns do not.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import dropwhile
from textwrap import TextWrapper

from qaudit.report import document as doc
from qaudit.report.format import inert, padded, printable, shortened, width_of, wrapped

WIDTH, WIDEST_TEXT = 80, 100


def render(document: doc.Page, width: int | None = None) -> str:
    """Render the headline and every block; the title is what was typed, so it is left out."""
    width = width or columns_of_terminal()
    parts = [filled(document.headline, width), *_blocks(document.blocks, width)]
    return inert("\n\n".join(filter(None, parts)) + "\n")


def filled(text: str | doc.Inline, width: int = WIDTH, indent: str = "") -> str:
    """Return a paragraph of plain text, names without their backticks."""
    bare = text.replace("`", "") if isinstance(text, str) else doc.plain_text(text)
    room = min(width, WIDEST_TEXT) - len(indent)
    return wrapped(printable(bare), room).replace("\n", f"\n{indent}")


def hanging(head: str, text: str) -> str:
    """Return a text beside its head, as wide as the terminal; paths and commands stay whole."""
    wrapper = TextWrapper(columns_of_terminal(), head, " " * len(head))
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(text)


def columns_of_terminal() -> int:
    return max(40, shutil.get_terminal_size((WIDTH, 24)).columns) if sys.stdout.isatty() else WIDTH


def _blocks(blocks: Sequence[doc.Block], width: int) -> Iterator[str]:
    for block in blocks:
        match block:
            case doc.Section():
                inner = list(filter(None, _blocks(block.blocks, width)))
                yield from [filled(block.title, width), *inner] if inner else []
            case doc.FoldBlock():
                yield from (filled(f"{block.summary}:", width), *_blocks(block.blocks, width))
            case doc.Paragraph():
                yield filled(block.runs, width)
            case doc.Lines():
                yield "\n".join(filled(line, width, "  ") for line in block.lines)
            case doc.List():
                yield "\n".join(f"- {filled(item, width, '  ')}" for item in block.items)
            case doc.CodeBlock():
                # Whole: a terminal breaks a long command itself, and what is copied still runs.
                yield "\n".join(map(printable, block.text.split("\n")))
            case doc.Figure():  # its lines as they are, those that are too long on several
                shown = map(printable, block.lines)
                yield "\n".join(x if width_of(x) <= width else wrapped(x, width) for x in shown)
            case doc.TableBlock():
                yield from _table(block, width)


def _table(table: doc.TableBlock, width: int) -> Iterator[str]:
    """Yield as many columns side by side as there is room for; then the others."""
    if not table.rows:
        return
    names, *rest = zip(*(row.cells for row in table.rows), strict=True)
    first = _names([_text(cell) for cell in names], max(24, 3 * width // 10))
    room = width - 2 - max(map(width_of, first))
    heads = [shortened(printable(name), room) for name in table.columns]
    has_small = any(cell.small for row in table.rows for cell in row.cells)
    for with_small, gap in ((True, 2), (True, 1), (False, 2), (False, 1)):
        texts = [[shortened(_text(cell, with_small), room) for cell in cells] for cells in rest]
        columns = [(_heading(h, c), c) for h, c in zip(heads, [first, *texts], strict=True)]
        widths = [max(map(width_of, [*heading, *cells])) for heading, cells in columns]
        if sum(widths) + gap * (len(widths) - 1) <= width:
            break
    if has_small and not with_small:
        yield filled(f"Intervals do not fit into {width} columns.", width)
    height = max(len(heading) for heading, _ in columns)
    blocks = []
    for (heading, cells), wide, is_right in zip(columns, widths, table.are_numbers, strict=True):
        above = [""] * (height - len(heading))
        align = ">" if is_right else "<"
        blocks.append([padded(text, wide, align) for text in (*above, *heading, *cells)])
    labels, *values = blocks
    lines = labels
    for column in values:
        if lines is not labels and width_of(lines[0] + column[0]) + gap > width:
            yield _joined(lines)
            lines = labels
        lines = [line + " " * gap + cell for line, cell in zip(lines, column, strict=True)]
    yield _joined(lines)


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(line.rstrip() for line in dropwhile(lambda line: not line.strip(), lines))


def _heading(name: str, cells: Sequence[str]) -> list[str]:
    pieces = re.findall(r"[^ -]+-?|[ -]", name)
    width = max(map(width_of, [*cells, *pieces]))
    lines = [""]
    for piece in pieces:
        if width_of(lines[-1] + piece.rstrip()) <= width:
            lines[-1] += piece
        else:
            lines.append(piece)
    return [line.strip() for line in lines if line.strip()]


def _text(cell: doc.Cell, with_small: bool = False) -> str:
    text = printable(doc.plain_text(cell.runs))
    return f"{text} {printable(cell.small)}" if with_small and cell.small else text


def _names(whole: Sequence[str], width: int) -> list[str]:
    """Shorten long names in their middle; number them where that makes two of them one."""
    for room in (width, width + 12):
        short = [shortened(name, room) for name in whole]
        if len(set(short)) == len(set(whole)):
            return short
    return [f"{k} {shortened(name, width)}" for k, name in enumerate(whole, 1)]
