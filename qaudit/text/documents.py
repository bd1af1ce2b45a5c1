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

Multiple-choice items from JSON lines.

    {"question": "...", "choices": ["...", "..."], "answer": 0}

Published sets differ in their names only: a `context` (or `ctx`) is taken as it is, a
`question` is put between "Question:" and "Answer:"; the options are `choices`, `options` or
`endings`; the answer is a position from zero, or a letter. A space is put before an option unless
there is one.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from qaudit.errors import CorpusError, MachineError
from qaudit.items.tokens import PromptedItem
from qaudit.support.keys import install
from qaudit.text.chat import MESSAGES, TOOLS, Chat
from qaudit.text.tokenizer import must_be_unicode
from qaudit.types import CHOICES, Document

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
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        name = f"python-topic:{topic}"
        if len(topics[topic]) >= _SHORTEST and (part is None or part_of(name) == part):
            yield Document(name=name, text=topics[topic])
    root, modules = Path(sysconfig.get_paths()["stdlib"]), []
    left_out = _LEFT_OUT if tests else _LEFT_OUT | _TESTS
    for folder, inside, files in os.walk(root):  # site-packages can hold a hundred times as many
        inside[:] = [name for name in inside if name not in left_out]
        modules += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(modules):
        name = f"python:{path.relative_to(root).as_posix()}"
        if part is not None and part_of(name) != part:
            continue
        with suppress(UnicodeDecodeError):  # a few test files are not UTF-8 on purpose
            text = path.read_text(encoding="utf-8")
            if len(text) >= _SHORTEST:
                yield Document(name=name, text=text)


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


FIELDS = ("text", "content")
_PLAIN, _OBJECTS = (".txt", ".md"), (".jsonl", ".ndjson", ".json", ".parquet")
KINDS = ".txt, .md, .jsonl, .jsonl.gz, .json.gz, .parquet"
LONGEST_LINE = 1 << 28
"""Bytes of a line of JSON at most: a zipped file can unfold into more than any memory."""


@dataclass(frozen=True)
class TextPath:
    """A file of text on this machine, and what a message calls it."""

    path: Path
    called: str

    @classmethod
    def of(cls, source: str, path: Path | None) -> TextPath:
        """Return the file of a source; `path` is that of a text of the Hub."""
        return cls(path, source) if path else cls(Path(source), str(Path(source)))

    def __str__(self) -> str:
        return self.called

    @property
    def damage_hint(self) -> str:
        if self.called == str(self.path):
            return "download the file again"
        return "its bytes are as they were published: give another text"


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
        documents = python_part(part)
        if part == "calibration":  # for further draws; the demo was trained on both parts
            documents = (*documents, *python_part("training"))
        name = f"the {part} part of the documents of Python {platform.python_version()}"
        return name, iter(documents)
    return source, read_documents(source, path, strata, chat)


def read_documents(
    source: str, path: Path | None = None, strata: str | None = None, chat: Chat | None = None
) -> Iterator[Document]:
    name, field = split_field(source)
    fields = Fields(field, strata, chat)
    root = TextPath.of(name, path)
    if not root.path.is_dir():
        return _documents(root, fields)
    inside = sorted(p for p in root.path.rglob("*") if p.is_file() and is_text(p.name))
    if not inside:
        raise CorpusError(f"there is no text in `{root}`", hint=f"text is {KINDS}")
    return (
        replace(d, name=(file.relative_to(root.path).parent / d.name).as_posix())
        for file in inside
        for d in _documents(TextPath(file, str(file)), fields)
    )


def split_field(source: str) -> tuple[str, str | None]:
    """Return a source without its `::field`, and the field."""
    name, separator, field = source.rpartition("::")
    return (name, field) if separator else (source, None)


def is_text(name: str) -> bool:
    return name.lower().endswith(_PLAIN) or name.lower().removesuffix(".gz").endswith(_OBJECTS)


@dataclass(frozen=True)
class Fields:
    """The fields of an object that are read; None: `FIELDS`, or no strata, or no conversations."""

    text: str | None
    strata: str | None = None
    chat: Chat | None = None

    def key(self, names: Collection[str]) -> str:
        """Return the field that is read; '' if there is none."""
        fields = (*FIELDS, MESSAGES) if self.chat else FIELDS
        return self.text or next((f for f in fields if f in names), "")

    def document(self, name: str, where: str, value: dict[str, Any]) -> Document:
        """Return an object as a document: its text, or its conversation."""
        key = self.key(value)
        text, chat = value.get(key), self.chat
        if not (key == MESSAGES or (isinstance(text, list) and key not in FIELDS)):
            chat = None
        if chat is None:
            if not isinstance(text, str):
                raise self._no_text(where, list(value), text)
            must_be_unicode(text, f"the text in {where}")
            return Document(name, text, self._stratum(where, value))
        return chat.document(name, where, value, key, self._stratum(where, value))

    def _no_text(self, where: str, fields: list[str], value: object) -> CorpusError:
        wanted = f"`{self.text}`" if self.text else " or ".join(f"`{f}`" for f in FIELDS)
        message = f"field {wanted} in {where} is not a text"
        if value is None:
            message = f"{where} has no field {wanted}"
        return CorpusError(
            message, hint=f"its fields are {', '.join(fields) or 'none'}; name one as `FILE::FIELD`"
        )

    def _stratum(self, where: str, value: dict[str, Any]) -> str:
        """Return the value of the field that groups documents."""
        if self.strata is None:
            return ""
        stratum = value.get(self.strata)
        if stratum is None or stratum == "":
            raise CorpusError(
                f"{where} has no value of the field `{self.strata}`, which groups documents",
                hint=f"its fields are {', '.join(value)}; every document needs a value",
            )
        name = str(stratum) if isinstance(stratum, int) else stratum
        if not isinstance(name, str) or not name.isprintable() or len(name) > LONGEST_STRATUM:
            raise CorpusError(
                f"field `{self.strata}` in {where} is no name that documents can be grouped by",
                hint=f"name a field of whole numbers or of words, of at most "
                f"{LONGEST_STRATUM} characters",
            )
        return name


def _documents(file: TextPath, fields: Fields) -> Iterator[Document]:
    must_exist(file)
    name = file.path.name
    if not is_text(name):
        raise CorpusError(f"`{file}` is not text that can be read", hint=f"text is {KINDS}")

    def documents() -> Iterator[Document]:
        is_parquet = name.lower().removesuffix(".gz").endswith(".parquet")
        number = 0
        if name.lower().endswith(_PLAIN):
            if text := _plain_text(file, fields):
                number = 1
                yield Document(name, text)
        else:
            rows = _parquet_rows(file, fields) if is_parquet else read_objects(file)
            for number, value in rows:
                where = f"{'row' if is_parquet else 'line'} {number} of `{file}`"
                yield fields.document(f"{name}:{number}", where, value)
        if not number:
            raise CorpusError(f"`{file}` is empty", hint="give a file with text in it")

    return documents()


def must_exist(file: TextPath) -> None:
    """Refuse a file that is not there."""
    path = file.path
    if path.is_file():
        return
    if path.exists():
        raise CorpusError(f"`{file}` is not a regular file", hint="name a file with text in it")
    hint = "give a path from the folder where the command runs, or `hf://datasets/org/name/path`"
    if file.called != str(path):
        hint = "run the same command again: the text is fetched first"
    raise CorpusError(f"there is no text file `{file}`", hint=hint)


def _plain_text(file: TextPath, fields: Fields) -> str:
    if fields.text is not None:
        raise CorpusError(
            f"`{file}` is plain text and has no field `{fields.text}`", hint="leave it out"
        )
    if fields.strata is not None:
        raise no_strata(f"`{file}`", fields.strata)
    raw = file.path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(file, raw[: error.start].count(b"\n") + 1) from error


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


def _without_nulls(value: Any) -> Any:
    """Return a value without null fields: a struct of Parquet has the fields of every row."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _parquet_rows(file: TextPath, fields: Fields) -> Iterator[tuple[int, dict[str, Any]]]:
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
            raise fields._no_text(f"`{file}`", names, None)
        further = {fields.strata, *([TOOLS] if fields.chat else [])}
        read = [column, *(further & set(names) - {column})]
        batches = table.iter_batches(batch_size=64, columns=read)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, value in enumerate(rows, 1):
            present = {key: _without_nulls(part) for key, part in value.items()}
            yield number, dict.fromkeys(names) | present
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"`{file}` cannot be read as Parquet: {' '.join(str(error).split())[:120]}",
            hint=file.damage_hint,
        ) from error


def no_strata(text: str, strata: str) -> CorpusError:
    """Return the refusal of a text whose documents have no fields."""
    return CorpusError(
        f"{text} is plain text and has no field `{strata}` to group its documents by",
        hint="leave out `strata`, or give JSON lines or Parquet with `--evaluation`",
    )


_CONTEXTS = ("context", "ctx", "question")
_OPTIONS = ("choices", "options", "endings")
_ANSWERS = ("answer", "label", "answerKey", "gold")
_HINT = 'write {"question": "...", "choices": ["...", "..."], "answer": 0} on each line'


def read_choices(source: str, path: Path | None = None) -> tuple[PromptedItem, ...]:
    file = TextPath.of(source, path)
    must_exist(file)
    items = []
    for number, value in read_objects(file):
        where = f"line {number} of `{file}`"
        field, context = _one_of(value, _CONTEXTS, where)
        if not isinstance(context, str):
            raise CorpusError(f"`{field}` in {where} is not a text", hint=_HINT)
        if field == "question":
            context = f"Question: {context}\nAnswer:"
        field, options = _one_of(value, _OPTIONS, where)
        if not isinstance(options, list) or not all(isinstance(o, str) and o for o in options):
            raise CorpusError(f"`{field}` in {where} is not a list of texts", hint=_HINT)
        if len(options) < 2:
            raise CorpusError(f"{where} has {len(options)} options, and 2 are needed", hint=_HINT)
        answer = _answer(_one_of(value, _ANSWERS, where)[1], len(options), where)
        glue = "" if not context or context[-1].isspace() else " "
        pairs = tuple((context, o if o[:1].isspace() else glue + o) for o in options)
        items.append(PromptedItem(CHOICES, f"{file.path.name}:{number}", pairs, (answer,)))
    if not items:
        raise CorpusError(f"`{file}` is empty", hint=_HINT)
    return tuple(items)


def _one_of(value: dict[str, Any], names: tuple[str, ...], where: str) -> tuple[str, Any]:
    for name in names:
        if name in value:
            return name, value[name]
    wanted = " or ".join(f"`{name}`" for name in names)
    fields = ", ".join(value) or "none"
    raise CorpusError(f"{where} has no {wanted}", hint=f"its fields are {fields}; {_HINT}")


def _answer(value: Any, count: int, where: str) -> int:
    names = {name: k for k in range(count) for name in (str(k), chr(ord("A") + k))}
    if str(value) in names:
        return names[str(value)]
    raise CorpusError(
        f"the answer in {where} is `{value}`, which is none of {count} options",
        hint=f"write a position from 0 to {count - 1}, or a letter",
    )
