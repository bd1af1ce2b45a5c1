"""A report as values: built once, rendered by `report.markdown`, `report.html`, `report.terminal`.

    Document(
        title="Quantization audit of demo",
        headline=prose("Ship `soup` at gptq-4bit."),
        blocks=(
            paragraph("64 documents, `soup` among 8 subjects."),
            Section("Added loss", (table(("subject", "loss"), [(name_cell("soup"), "2.71")]),)),
        ),
    )

Text is kept as it was written, control characters included. Each renderer escapes it, in one
place, so that no name of a repository or a file becomes markup or moves a cursor. In `prose` and
wherever a plain `str` is accepted, what is between backticks is code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from qaudit.report.format import Value, or_dash, plural
from qaudit.types import Interval, Status


@dataclass(frozen=True)
class TextRun:
    """A piece of a line, in one style; `href` makes it a link."""

    text: str
    code: bool = False
    strong: bool = False
    emphasis: bool = False
    href: str = ""


Inline = tuple[TextRun, ...]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    runs: Inline


@dataclass(frozen=True)
class Lines:
    """Sentences, each on a line of its own."""

    lines: tuple[Inline, ...]


@dataclass(frozen=True)
class List:
    """A list with bullets."""

    items: tuple[Inline, ...]


@dataclass(frozen=True)
class CodeBlock:
    """Lines as they are; of a shell command (`sh`) the page offers a copy."""

    text: str
    language: str = "text"


@dataclass(frozen=True)
class Figure:
    """A picture by its name; `lines` of text replace it where no picture can be shown."""

    name: str
    alt: str
    lines: tuple[str, ...] = ()


def status_in_words(status: Status) -> str:
    return "not judged" if status == "unjudged" else status


@dataclass(frozen=True)
class Cell:
    """A cell: `value` sorts it, `small` is an interval, which a terminal may leave out."""

    runs: Inline
    value: float | None = None
    small: str = ""


Cells = Sequence[str | Cell]


@dataclass(frozen=True)
class TableRow:
    """A row; the page folds `minor` rows of a long table, and highlights a `chosen` one."""

    cells: tuple[Cell, ...]
    minor: bool = False
    chosen: bool = False


@dataclass(frozen=True)
class TableBlock:
    """A table; its first column names its rows."""

    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    caption: str = ""
    name: str = ""

    @property
    def are_numbers(self) -> list[bool]:
        """Which columns have values, and are aligned on their right; never the first."""
        return [
            k > 0 and any(row.cells[k].value is not None for row in self.rows)
            for k in range(len(self.columns))
        ]


@dataclass(frozen=True)
class FoldBlock:
    """Blocks behind a summary."""

    summary: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Section:
    """Blocks under a heading. Of a text that is too long the most expendable section goes first."""

    title: str
    blocks: tuple[Block, ...]
    expendable: int = 0


Block = Paragraph | Lines | List | CodeBlock | Figure | TableBlock | FoldBlock | Section


@dataclass(frozen=True)
class Page:
    """A report: title, one sentence that answers it, and what that is based on.

    `is_folded`: Markdown folds every section, so that what is before them is one screen.
    """

    title: str
    headline: Inline
    blocks: tuple[Block, ...]
    is_folded: bool = False


def words(text: str) -> Inline:
    """Return text as it is, backticks included."""
    return (TextRun(text),) if text else ()


def code(name: str) -> Inline:
    """Return a name as code."""
    return (TextRun(name, code=True),)


def prose(sentence: str) -> Inline:
    """Return a sentence in which names are between backticks."""
    parts = sentence.split("`")
    if len(parts) % 2 == 0:  # the odd backtick belongs to a name: nothing can be trusted as code
        return words(sentence)
    return tuple(TextRun(part, code=bool(k % 2)) for k, part in enumerate(parts) if part)


def strong(text: str | Inline) -> Inline:
    return tuple(replace(run, strong=True) for run in inline(text))


def emphasis(text: str | Inline) -> Inline:
    return tuple(replace(run, emphasis=True) for run in inline(text))


def inline(text: str | Inline) -> Inline:
    """Read a string as prose; leave runs as they are."""
    return prose(text) if isinstance(text, str) else text


def paragraph(*sentences: str | Inline) -> Paragraph:
    """Return sentences as one paragraph."""
    runs: list[TextRun] = []
    for sentence in map(inline, sentences):
        runs += [TextRun(" ")] if runs and sentence else []
        runs += sentence
    return Paragraph(tuple(runs))


def bullets(*items: str | Inline) -> List:
    return List(tuple(map(inline, items)))


def bullets_of(items: Sequence[str | Inline]) -> tuple[Block, ...]:
    """Return a list, if it has items."""
    return (bullets(*items),) if items else ()


def fold(summary: str, *blocks: Block) -> FoldBlock:
    return FoldBlock(summary, blocks)


def cell(text: str | Inline, *, value: float | None = None, small: str = "") -> Cell:
    """Return a cell; a string is shown as it is."""
    return Cell(words(text) if isinstance(text, str) else text, value, small)


def interval_cell(interval: Interval | None, show: Callable[[Interval], str]) -> Cell:
    """Return a cell with a number and, in small, the interval behind it: `1.2 [0.9, 1.5]`."""
    number, bracket, ends = or_dash(interval, show).partition(" [")
    value = interval.estimate if interval and math.isfinite(interval.estimate) else None
    return cell(number, value=value, small=f"[{ends}" if bracket else "")


def name_cell(name: str, *, value: float | None = None) -> Cell:
    return Cell(code(name), value)


def row(*cells: str | Cell, minor: bool = False, chosen: bool = False) -> TableRow:
    """Return a row; a string is a cell that is shown as it is."""
    return TableRow(tuple(cell(c) if isinstance(c, str) else c for c in cells), minor, chosen)


def table(
    columns: Sequence[str],
    rows: Iterable[Cells | TableRow],
    caption: str = "",
    name: str = "",
) -> TableBlock:
    made = (each if isinstance(each, TableRow) else row(*each) for each in rows)
    return TableBlock(tuple(columns), tuple(made), caption, name)


Columns = Mapping[str, Callable[[Value], str | Cell]]
"""What each column of a table shows of a value, by its name."""


def table_of(rows: Iterable[Value], columns: Columns[Value], name: str = "") -> TableBlock:
    return table(tuple(columns), ([of(row) for of in columns.values()] for row in rows), name=name)


def and_more(more: int, noun: str) -> tuple[Block, ...]:
    """Return how many were left out, if any were."""
    return (paragraph(f"and {plural(more, noun)} more"),) if more > 0 else ()


def plain_text(runs: Inline) -> str:
    """Return text without its styles."""
    return "".join(run.text for run in runs)
