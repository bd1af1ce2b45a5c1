"""A report as values: built once, rendered by `report.markdown`, `report.html`, `report.terminal`.

    Document(
        title="Quantization audit of demo",
        headline=prose("Ship `soup` at gptq-4bit."),
        blocks=(
            paragraph("64 documents, `soup` among 8 subjects."),
            Section("Added loss", (Table(columns("subject"), (row(name_cell("soup")),)),)),
        ),
    )

Text is kept as it was written, control characters included. Each renderer escapes it, in one
place, so that no name of a repository or a file becomes markup or moves a cursor. In `prose` and
wherever a plain `str` is accepted, what is between backticks is code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from qaudit.types import Status


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
    caption: str = ""
    lines: tuple[str, ...] = ()


def status_in_words(status: Status) -> str:
    return "not judged" if status == "unjudged" else status


@dataclass(frozen=True)
class Cell:
    """A cell: `value` sorts it, `small` is an interval, which a terminal may leave out."""

    runs: Inline
    value: float | None = None
    small: str = ""


@dataclass(frozen=True)
class Column:
    """A column; a terminal shows its short name, if it has one."""

    name: str
    align: Literal["left", "right"] = "left"
    short: str = ""


@dataclass(frozen=True)
class TableRow:
    """A row; of a long table the page folds `minor` rows, other surfaces leave them out.

    The page highlights a `chosen` row.
    """

    cells: tuple[Cell, ...]
    minor: bool = False
    chosen: bool = False


@dataclass(frozen=True)
class TableBlock:
    """A table; its first column names its rows. `selected` says which rows are not minor."""

    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    caption: str = ""
    selected: str = ""
    name: str = ""

    @property
    def selection(self) -> str:
        """Which rows are shown where minor ones are not; empty where all are."""
        count = sum(not row.minor for row in self.rows)
        if count == len(self.rows):
            return ""
        return f"{count} of {len(self.rows)} rows are shown: {self.selected}".removesuffix(": ")


@dataclass(frozen=True)
class FoldBlock:
    """Blocks behind a summary, closed unless `is_open`."""

    summary: str
    blocks: tuple[Block, ...]
    is_open: bool = False


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


def lines(*sentences: str | Inline) -> Lines:
    return Lines(tuple(map(inline, sentences)))


def bullets(*items: str | Inline) -> List:
    return List(tuple(map(inline, items)))


def fold(summary: str, *blocks: Block) -> FoldBlock:
    """Return closed blocks."""
    return FoldBlock(summary, blocks)


def cell(text: str | Inline, *, value: float | None = None, small: str = "") -> Cell:
    """Return a cell; a string is shown as it is."""
    return Cell(words(text) if isinstance(text, str) else text, value, small)


def interval_cell(text: str, *, value: float | None = None) -> Cell:
    """Return a cell with a number and, in small, the interval behind it: `1.2 [0.9, 1.5]`."""
    number, bracket, bounds = text.partition(" [")
    return cell(number, value=value, small=f"[{bounds}" if bracket else "")


def name_cell(name: str, *, value: float | None = None) -> Cell:
    return Cell(code(name), value)


def row(*cells: str | Cell, minor: bool = False, chosen: bool = False) -> TableRow:
    """Return a row; a string is a cell that is shown as it is."""
    return TableRow(
        tuple(cell(content) if isinstance(content, str) else content for content in cells),
        minor,
        chosen,
    )


def columns(*names: str) -> tuple[Column, ...]:
    return tuple(map(Column, names))


def plain_text(runs: Inline) -> str:
    """Return text without its styles."""
    return "".join(run.text for run in runs)
