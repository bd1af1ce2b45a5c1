"""Text on this machine -> documents: plain text, JSON lines (also gzipped), Parquet.

A plain text file is one document, a folder is all the files in it, a line of JSON is a
document, and so is a row of Parquet. Files are read lazily, because published text comes in
files a thousand times longer than what an audit needs. The text of an object is its `text`,
its `content`, or what the source names: `file.jsonl::body`. One that has none, and `messages`, is
a conversation (`text.chat`).

Whatever cannot be read as text stops the audit and is named by its line: skipping it would change
which document is the hundredth. A file from the Hub is named as in the recipe, and not by its
place in a cache.

The documents every Python interpreter carries: reference topics and standard library sources.

They are the default text for the demo and for local folders, because they cost no download
and ship no text of ours. Python versions differ in their documents, so a published number
names the version it was measured on.

A document belongs to one part for ever, by the hash of its *name*: a module that was held
out of training in one Python version is held out in every other.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from qaudit.errors import CorpusError, MachineError
from qaudit.support.extras import install
from qaudit.support.keys import nearest
from qaudit.text.chat import MESSAGES, TOOLS, Chat
from qaudit.text.cutting import must_be_unicode
from qaudit.types import Document

LONGEST_STRATUM = 100
"""Characters of a stratum's name at most: it heads a row of a table."""

Part = Literal["evaluation", "calibration", "training"]

# Tables of numbers, generated code, and vendored wheels are no text to train on.
_LEFT_OUT = {
    "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__", "ensurepip",
}  # fmt: skip
_TESTS = {"test", "tests", "idle_test"}
_SHORTEST = 400  # characters; a shorter module is a stub


def part_of(name: str) -> Part:
    """Return the part a document of this name belongs to: 1 in 6 evaluation, 1 in 6 calibration."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 6
    return ("evaluation", "calibration")[bucket] if bucket < 2 else "training"


def python_documents(*, tests: bool = False, part: Part | None = None) -> Iterator[Document]:
    """Yield this interpreter's documents in name order: all of them, or those of one part.

    `tests` adds its test suite, if installed.
    """
    yield from _topics(part)
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _modules(root, tests=tests):
        name = f"python:{path.relative_to(root).as_posix()}"
        if part is not None and part_of(name) != part:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few test files are not UTF-8 on purpose
        if len(text) >= _SHORTEST:
            yield Document(name=name, text=text)


def _modules(root: Path, *, tests: bool) -> list[Path]:
    """Return the modules below a folder; site-packages alone can hold a hundred times as many."""
    modules = []
    for folder, inside, files in os.walk(root):
        left_out = _LEFT_OUT if tests else _LEFT_OUT | _TESTS
        inside[:] = [name for name in inside if name not in left_out]
        modules += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(modules)


@cache  # a plan reads it, and then the run
def python_part(part: Part) -> tuple[Document, ...]:
    """Return the documents of one part in an order that is mixed and never changes.

    Names sort packages together, so that the first few would all be of `asyncio`; the hash of
    the name mixes them, and a document that comes or goes moves no other. A text that
    two parts have under two names is left to evaluation.
    """
    documents = list(python_documents(part=part))
    if part != "evaluation":
        heldout = {d.sha256 for d in python_documents(part="evaluation")}
        documents = [d for d in documents if d.sha256 not in heldout]
    return tuple(sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()))


def calibration_text() -> tuple[Document, ...]:
    """Return the calibration part and, for further draws, the training part behind it.

    The demo was trained on both, so that all draws are of one kind.
    """
    return (*python_part("calibration"), *python_part("training"))


def _topics(part: Part | None) -> Iterator[Document]:
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        name = f"python-topic:{topic}"
        if len(topics[topic]) >= _SHORTEST and (part is None or part_of(name) == part):
            yield Document(name=name, text=topics[topic])


FIELDS = ("text", "content")
KINDS = ".txt, .md, .jsonl, .jsonl.gz, .json.gz, .parquet"
LONGEST_LINE = 1 << 28
"""Bytes of a line of JSON at most: a zipped file can unfold into more than any memory."""


@dataclass(frozen=True)
class TextPath:
    """A file of text on this machine, and what a message calls it."""

    path: Path
    called: str

    def __str__(self) -> str:
        return self.called

    @property
    def is_fetched(self) -> bool:
        """Return whether the file is from the Hub, whose bytes are checked."""
        return self.called != str(self.path)

    @property
    def damage_hint(self) -> str:
        if self.is_fetched:
            return "its bytes are as they were published: give another text"
        return "download the file again"


def text_of(
    source: str | None,
    part: Part,
    path: Path | None = None,
    strata: str | None = None,
    chat: Chat | None = None,
) -> tuple[str, Iterator[Document]]:
    """Return the name of a source in the record, and its documents.

    Without a source: this part of the documents that this Python carries. `path` is that of a
    text of the Hub; `strata` the field that groups its documents; `chat` makes documents of
    conversations.
    """
    if source is None:
        if strata is not None:
            raise no_strata("the text that Python carries", strata)
        documents = calibration_text() if part == "calibration" else python_part(part)
        name = f"the {part} part of the documents of Python {platform.python_version()}"
        return name, iter(documents)
    return source, read_documents(source, path, strata, chat)


def read_documents(
    source: str, path: Path | None = None, strata: str | None = None, chat: Chat | None = None
) -> Iterator[Document]:
    name, field = split_field(source)
    fields = Fields(field, strata, chat)
    root = TextPath(path or Path(name), name if path else str(Path(name)))
    if root.path.is_dir():
        inside = sorted(p for p in root.path.rglob("*") if p.is_file() and is_text(p.name))
        if not inside:
            raise CorpusError(f"there is no text in `{root}`", hint=f"text is {KINDS}")
        return (
            replace(
                d,
                name=f"{file.relative_to(root.path).parent.as_posix()}/{d.name}".removeprefix("./"),
            )
            for file in inside
            for d in _documents(TextPath(file, str(file)), fields)
        )
    return _documents(root, fields)


def split_field(source: str) -> tuple[str, str | None]:
    """Return a source without its `::field`, and the field."""
    name, separator, field = source.rpartition("::")
    return (name, field) if separator else (source, None)


def is_text(name: str) -> bool:
    return _reader(name) is not None


@dataclass(frozen=True)
class Fields:
    """The fields of an object that are read; None: `FIELDS`, or no strata."""

    text: str | None
    strata: str | None = None
    chat: Chat | None = None

    def key(self, names: Collection[str]) -> str:
        """Return the field that is read; '' if there is none."""
        fields = (*FIELDS, MESSAGES) if self.chat else FIELDS
        return self.text or next((f for f in fields if f in names), "")

    def document(self, name: str, where: str, value: dict[str, Any], key: str) -> Document:
        """Return an object as a document: its text, or its conversation."""
        text = value.get(key)
        if self.chat and (key == MESSAGES or (isinstance(text, list) and key not in FIELDS)):
            stratum = stratum_of(where, self.strata, value)
            return self.chat.document(name, where, value, key, stratum)
        if not isinstance(text, str):
            raise _no_text(where, self.text, list(value), text)
        must_be_unicode(text, f"the text in {where}")
        return Document(name, text, stratum_of(where, self.strata, value))


Reader = Callable[[TextPath, Fields], Iterator[Document]]


def _documents(file: TextPath, fields: Fields) -> Iterator[Document]:
    must_exist(file)
    reader = _reader(file.path.name)
    if reader is None:
        raise CorpusError(f"`{file}` is not text that can be read", hint=f"text is {KINDS}")
    return _not_empty(file, reader(file, fields))


def _reader(name: str) -> Reader | None:
    name = name.lower()
    unzipped = name.removesuffix(".gz")
    if unzipped.endswith((".jsonl", ".ndjson", ".json")):
        return _from_lines
    if unzipped.endswith(".parquet"):
        return _from_parquet
    return _from_text if name.endswith((".txt", ".md")) else None


def must_exist(file: TextPath) -> None:
    """Refuse a file that is not there, naming one that is nearly called so."""
    path = file.path
    if path.is_file():
        return
    if path.exists():
        raise CorpusError(f"`{file}` is not a regular file", hint="name a file with text in it")
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, siblings) if siblings else ""
    if file.is_fetched:
        near = "run the same command again: the text is fetched first"
    elif str(path).startswith(("http:", "https:")):
        near = "download it and give its path, or write `hf://datasets/org/name/path`"
    elif not near.startswith("did you mean"):
        near = "paths are read from the folder where the command runs"
    raise CorpusError(f"there is no text file `{file}`", hint=near)


def _not_empty(file: TextPath, documents: Iterator[Document]) -> Iterator[Document]:
    if (first := next(documents, None)) is None:
        raise CorpusError(f"`{file}` is empty", hint="give a file with text in it")
    yield first
    yield from documents


def _from_text(file: TextPath, fields: Fields) -> Iterator[Document]:
    if fields.text is not None:
        raise CorpusError(
            f"`{file}` is plain text and has no field `{fields.text}`", hint="leave it out"
        )
    if fields.strata is not None:
        raise no_strata(f"`{file}`", fields.strata)
    raw = file.path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(file, raw[: error.start].count(b"\n") + 1) from error
    if text:
        yield Document(file.path.name, text)


def _not_utf8(file: TextPath, line: int) -> CorpusError:
    return CorpusError(f"line {line} of `{file}` is not UTF-8", hint="save the file as UTF-8")


def read_objects(file: TextPath) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, each with its line number."""
    for number, raw in _lines(file):
        try:
            value = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise _not_utf8(file, number) from error
        except (ValueError, RecursionError) as error:
            raise CorpusError(
                f"line {number} of `{file}` is not JSON", hint="write one object on each line"
            ) from error
        if not isinstance(value, dict):
            raise CorpusError(
                f"line {number} of `{file}` is a {type(value).__name__} and not an object",
                hint='write one object on each line, such as {"text": "..."}',
            )
        yield number, value


def _lines(file: TextPath) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that hold anything, unpacked if need be."""
    zipped = file.path.suffix.lower() == ".gz"
    with gzip.open(file.path, "rb") if zipped else file.path.open("rb") as raw:
        number = 0
        try:
            for number, line in enumerate(iter(partial(raw.readline, LONGEST_LINE), b""), 1):
                if len(line) == LONGEST_LINE:
                    raise CorpusError(
                        f"line {number} of `{file}` is longer than {LONGEST_LINE >> 20} MiB",
                        hint="write one document on each line",
                    )
                if line.strip():
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise CorpusError(
                f"`{file}` is damaged or cut short after line {number}", hint=file.damage_hint
            ) from error


def _from_lines(file: TextPath, fields: Fields) -> Iterator[Document]:
    for number, value in read_objects(file):
        where, name = f"line {number} of `{file}`", f"{file.path.name}:{number}"
        yield fields.document(name, where, value, fields.key(value))


def _no_text(where: str, field: str | None, fields: list[str], value: object) -> CorpusError:
    wanted = f"`{field}`" if field else " or ".join(f"`{f}`" for f in FIELDS)
    message = f"field {wanted} in {where} is not a text"
    if value is None:
        message = f"{where} has no field {wanted}"
    return CorpusError(
        message, hint=f"its fields are {', '.join(fields) or 'none'}; name one as `FILE::FIELD`"
    )


def _without_nulls(value: Any) -> Any:
    """Return a value without null fields: a struct of Parquet has the fields of every row."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _from_parquet(file: TextPath, fields: Fields) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MachineError(
            f"`{file}` is Parquet, and reading it needs pyarrow",
            hint=install("pyarrow"),
        ) from error
    try:
        table = pyarrow.parquet.ParquetFile(file.path)
        names = list(table.schema_arrow.names)
        column = fields.key(names)
        if column not in names:
            raise _no_text(f"`{file}`", fields.text, names, None)
        further = {fields.strata, *([TOOLS] if fields.chat else [])}
        read = [column, *(further & set(names) - {column})]
        batches = table.iter_batches(batch_size=64, columns=read)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, value in enumerate(rows, 1):
            where, name = f"row {number} of `{file}`", f"{file.path.name}:{number}"
            present = {key: _without_nulls(part) for key, part in value.items()}
            yield fields.document(name, where, dict.fromkeys(names) | present, column)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"`{file}` cannot be read as Parquet: {' '.join(str(error).split())[:120]}",
            hint=file.damage_hint,
        ) from error


def stratum_of(where: str, strata: str | None, value: dict[str, Any]) -> str:
    """Return the value of the field that groups documents."""
    if strata is None:
        return ""
    stratum = value.get(strata)
    if stratum is None or stratum == "":
        raise CorpusError(
            f"{where} has no value of the field `{strata}`, which groups documents",
            hint=f"its fields are {', '.join(value)}; every document needs a value",
        )
    name = str(stratum) if isinstance(stratum, int) else stratum
    if not isinstance(name, str) or not name.isprintable() or len(name) > LONGEST_STRATUM:
        raise CorpusError(
            f"field `{strata}` in {where} is no name that documents can be grouped by",
            hint=f"name a field of whole numbers or of words, of at most "
            f"{LONGEST_STRATUM} characters",
        )
    return name


def no_strata(text: str, strata: str) -> CorpusError:
    """Return the refusal of a text whose documents have no fields."""
    return CorpusError(
        f"{text} is plain text and has no field `{strata}` to group its documents by",
        hint="leave out `strata`, or give JSON lines or Parquet with `--evaluation`",
    )
