"""Local text -> documents: plain text, JSON lines (also gzipped), Parquet.

A plain text file is one document, a folder is all the files in it, a line of JSON is a
document, and so is a row of Parquet. Files are read lazily, because published text comes in
files a thousand times longer than what an audit needs. The text of an object is its `text`,
its `content`, or what the source names: `file.jsonl::body`.

Whatever cannot be read as text stops the audit and is named by its line. Skipping it would
change the document everybody else calls the hundredth.
"""

from __future__ import annotations

import gzip
import json
import platform
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qaudit.core.keys import nearest
from qaudit.errors import CorpusError, MachineError
from qaudit.sources.python_text import Part, python_part
from qaudit.types import Document

FIELDS = ("text", "content")
KINDS = ".txt, .md, .jsonl, .jsonl.gz, .json.gz, .parquet"


def text_of(source: str | None, part: Part) -> tuple[str, Iterator[Document]]:
    """Return what a source is called in the record, and its documents.

    Without a source: this part of the documents that this Python carries.
    """
    if source is None:
        name = f"the {part} part of the documents of Python {platform.python_version()}"
        return name, iter(python_part(part))
    return source, read_documents(source)


def read_documents(source: str) -> Iterator[Document]:
    """Return the documents of a file or folder, lazily and in order."""
    path, field = _split(source)
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file() and _reader(p))
        if not inside:
            raise CorpusError(f"there is no text in `{path}`", hint=f"text is {KINDS}")
        return (
            Document(
                f"{file.relative_to(path).parent.as_posix()}/{d.name}".removeprefix("./"), d.text
            )
            for file in inside
            for d in _documents(file, field)
        )
    return _documents(path, field)


def _split(source: str) -> tuple[Path, str | None]:
    name, separator, field = source.rpartition("::")
    return (Path(name), field) if separator else (Path(source), None)


Reader = Callable[[Path, str | None], Iterator[Document]]


def _documents(path: Path, field: str | None) -> Iterator[Document]:
    must_exist(path)
    reader = _reader(path)
    if reader is None:
        raise CorpusError(f"`{path}` is not text that can be read", hint=f"text is {KINDS}")
    return _not_empty(path, reader(path, field))


def _reader(path: Path) -> Reader | None:
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return _from_lines
    if name.endswith(".parquet"):
        return _from_parquet
    return _from_text if path.suffix.lower() in (".txt", ".md") else None


def must_exist(path: Path) -> None:
    """Refuse a file that is not there, naming one that is nearly called so."""
    if path.is_file():
        return
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, siblings) if siblings else ""
    if str(path).startswith("hf:"):
        near = "download the file and give its path"
    elif not near.startswith("did you mean"):
        near = "paths are read from the folder where the command runs"
    raise CorpusError(f"there is no text file `{path}`", hint=near)


def _not_empty(path: Path, documents: Iterator[Document]) -> Iterator[Document]:
    count = 0
    for count, document in enumerate(documents, 1):  # noqa: B007 - counted for what follows
        yield document
    if count == 0:
        raise CorpusError(f"`{path}` is empty", hint="give a file with text in it")


# -------------------------------------------------------------------------------- plain text


def _from_text(path: Path, field: str | None) -> Iterator[Document]:
    if field is not None:
        raise CorpusError(f"`{path}` is plain text and has no field `{field}`", hint="leave it out")
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, raw[: error.start].count(b"\n") + 1) from error
    if text:
        yield Document(path.name, text)


def _not_utf8(path: Path, line: int) -> CorpusError:
    return CorpusError(f"line {line} of `{path}` is not UTF-8", hint="save the file as UTF-8")


# ------------------------------------------------------------------------------- JSON lines


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, each with its line number."""
    for number, raw in _lines(path):
        try:
            value = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise _not_utf8(path, number) from error
        except (ValueError, RecursionError) as error:
            raise CorpusError(
                f"line {number} of `{path}` is not JSON", hint="write one object on each line"
            ) from error
        if not isinstance(value, dict):
            raise CorpusError(
                f"line {number} of `{path}` is a {type(value).__name__} and not an object",
                hint='write one object on each line, such as {"text": "..."}',
            )
        yield number, value


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that hold anything, unpacked if need be."""
    zipped = path.suffix.lower() == ".gz"
    with gzip.open(path, "rb") if zipped else path.open("rb") as file:
        number = 0
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise CorpusError(
                f"`{path}` is damaged or cut short after line {number}",
                hint="download the file again",
            ) from error


def _from_lines(path: Path, field: str | None) -> Iterator[Document]:
    for number, value in read_objects(path):
        text = value.get(field or next((f for f in FIELDS if f in value), ""))
        if not isinstance(text, str):
            raise _no_text(f"line {number} of `{path}`", field, list(value), text)
        if not _can_be_encoded(text):
            raise CorpusError(
                f"the text in line {number} of `{path}` holds half a character",
                hint="a lone surrogate such as \\ud800 cannot be written as UTF-8: take it out",
            )
        yield Document(f"{path.name}:{number}", text)


def _no_text(where: str, field: str | None, fields: list[str], found: object) -> CorpusError:
    wanted = f"`{field}`" if field else " or ".join(f"`{f}`" for f in FIELDS)
    if found is None:
        message = f"{where} has no field {wanted}"
    else:
        message = f"field {wanted} in {where} is not a text"
    return CorpusError(
        message, hint=f"its fields are {', '.join(fields) or 'none'}; name one as `FILE::FIELD`"
    )


def _can_be_encoded(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---------------------------------------------------------------------------------- Parquet


def _from_parquet(path: Path, field: str | None) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MachineError(
            f"`{path}` is Parquet, and reading it needs pyarrow",
            hint="install it with `pip install 'qaudit[parquet]'`",
        ) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = list(file.schema_arrow.names)
        column = field or next((f for f in FIELDS if f in names), None)
        if column not in names:
            raise _no_text(f"`{path}`", field, names, None)
        batches = file.iter_batches(batch_size=64, columns=[column])
        texts = (text for batch in batches for text in batch.column(0).to_pylist())
        for row, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise _no_text(f"row {row} of `{path}`", column, names, text)
            yield Document(f"{path.name}:{row}", text)
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(
            f"`{path}` cannot be read as Parquet: {' '.join(str(error).split())[:120]}",
            hint="it may be damaged or cut short: download it again",
        ) from error
