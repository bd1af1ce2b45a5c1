"""A document as plain text, in 80 columns or as many as the terminal has.

Without colour: what matters is written in words and marks. Widths are counted in columns of the
terminal, so that names in any script keep a table straight. A table leaves out its intervals
where they do not fit, and goes on in a second table where its columns do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qaudit.report.document import (
    Block,
    Cell,
    Code,
    Document,
    Figure,
    Fold,
    Inline,
    List,
    Paragraph,
    Section,
    Table,
    plain_text,
    shown_on,
)
from qaudit.report.format import printable
from qaudit.report.width import padded, shortened, width_of, wrapped

WIDTH = 80
BEST = "*"


def render(document: Document, width: int = WIDTH) -> str:
    """Render the headline and every block; the title is what was typed, so it is left out."""
    blocks = shown_on("terminal", document.blocks)
    parts = [filled(document.headline, width), *_blocks(blocks, width)]
    return "\n\n".join(filter(None, parts)) + "\n"


def filled(text: str | Inline, width: int = WIDTH, indent: str = "") -> str:
    """Return a paragraph of plain text, names without their backticks."""
    bare = text.replace("`", "") if isinstance(text, str) else plain_text(text)
    return wrapped(printable(bare), width - len(indent)).replace("\n", f"\n{indent}")


def _blocks(blocks: Sequence[Block], width: int) -> Iterator[str]:
    for block in blocks:
        match block:
            case Section():
                yield from (filled(block.title, width), *_blocks(block.blocks, width))
            case Fold():
                yield from (filled(f"{block.summary}:", width), *_blocks(block.blocks, width))
            case Paragraph():
                yield filled(block.runs, width)
            case List():
                yield "\n".join(f"- {filled(item, width, '  ')}" for item in block.items)
            case Code():
                yield _lines(block.text.split("\n"), width)
            case Figure():
                yield _lines(block.lines, width)
            case Table():
                yield "\n\n".join([*_legend(block, width), *_tables(block, width)])


def _lines(lines: Sequence[str], width: int) -> str:
    """Return lines as they are, those that are too long on several."""
    shown = (printable(line) for line in lines)
    return "\n".join(line if width_of(line) <= width else wrapped(line, width) for line in shown)


# --------------------------------------------------------------------- tables


def _legend(table: Table, width: int) -> list[str]:
    said = [f"{BEST} {table.strong}"] if table.strong else []
    said += [f"{mark.sign} {mark.meaning}" for mark in table.marks]
    minor = sum(row.minor for row in table.rows)
    more = f"{len(table.rows) - minor} of {len(table.rows)} rows" if minor else ""
    return [filled("; ".join(filter(None, [*said, more])) + ":", width)] if said or more else []


def _tables(table: Table, width: int) -> Iterator[str]:
    """Set as many columns side by side as there is room for, then start another table."""
    rows = [row.cells for row in table.rows if not row.minor]
    if not rows:
        return
    names, *others = zip(*rows, strict=True)
    first = _names(names, max(24, 3 * width // 10))
    room = width - 2 - max(map(width_of, first))
    for with_small in (True, False):
        cells = [_texts(column, room, with_small=with_small) for column in others]
        columns = [
            _Column(_heading(shortened(printable(column.name), room), texts), texts, is_right)
            for column, texts, is_right in zip(
                table.columns,
                [first, *cells],
                [False, *(c.align == "right" or _has_numbers(of) for c, of in
                          zip(table.columns[1:], others, strict=True))],
                strict=True,
            )
        ]  # fmt: skip
        if sum(column.width + 2 for column in columns) - 2 <= width:
            break
    yield from _side_by_side(columns, width)


@dataclass(frozen=True)
class _Column:
    """The lines of a heading, and cells beneath it."""

    heading: list[str]
    cells: list[str]
    is_right: bool

    @property
    def width(self) -> int:
        return max(map(width_of, [*self.heading, *self.cells]))

    def lines(self, height: int) -> list[str]:
        """Return lines of one width, the heading filled on top."""
        above = [""] * (height - len(self.heading))
        align = ">" if self.is_right else "<"
        return [padded(text, self.width, align) for text in (*above, *self.heading, *self.cells)]


def _side_by_side(columns: list[_Column], width: int) -> Iterator[str]:
    height = max(len(column.heading) for column in columns)
    labels, *others = (column.lines(height) for column in columns)
    lines = labels
    for column in others:
        if lines is not labels and width_of(lines[0]) + 2 + width_of(column[0]) > width:
            yield "\n".join(line.rstrip() for line in lines)
            lines = labels
        lines = [f"{line}  {cell}" for line, cell in zip(lines, column, strict=True)]
    yield "\n".join(line.rstrip() for line in lines)


def _heading(name: str, cells: Sequence[str]) -> list[str]:
    """Break a heading that is wider than what is beneath it."""
    pieces = re.findall(r"[^ -]+-?|[ -]", name)
    width = max(map(width_of, [*cells, *pieces]))
    lines = [""]
    for piece in pieces:
        if width_of(lines[-1] + piece.rstrip()) <= width:
            lines[-1] += piece
        else:
            lines.append(piece)
    return [line.strip() for line in lines if line.strip()]


def _has_numbers(cells: Sequence[Cell]) -> bool:
    return any(cell.value is not None for cell in cells)


def _texts(cells: Sequence[Cell], room: int, *, with_small: bool) -> list[str]:
    """Return the texts of a column, with a place for marks where there are any."""
    place = "  " if any(cell.mark for cell in cells) else ""
    texts = []
    for cell in cells:
        text = f"{BEST * cell.strong}{printable(plain_text(cell.runs))}"
        text += f" {cell.mark.sign}" if cell.mark else place
        text += f" {printable(cell.small)}" if with_small and cell.small else ""
        texts.append(shortened(text, room))
    return texts


def _names(cells: Sequence[Cell], width: int) -> list[str]:
    """Shorten long names in their middle; number them where that makes two of them one."""
    whole = [printable(plain_text(cell.runs)) for cell in cells]
    for room in (width, width + 12):
        short = [shortened(name, room) for name in whole]
        if len(set(short)) == len(set(whole)):
            return short
    return [f"{k} {shortened(name, width)}" for k, name in enumerate(whole, 1)]
