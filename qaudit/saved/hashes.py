"""The sha256 of every file of evidence, recorded when it is written: an edited file is not used.

The lines are those of `sha256sum`, in `SHA256SUMS` of the folder, and again in a file of the
user's cache whose name is a hash of machine and folder: an edit of the folder does not reach it.
Where several processes measure into one folder, each has a `SHA256SUMS.*` of its own, because
appending to one file from several hosts loses lines. A file is used again if a record has its hash
and the copy does not differ. Folders of the first version have no `SHA256SUMS`: there the hashes
in `audit.json` are the record.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from qaudit.errors import not_written
from qaudit.types import digest
from qaudit.whole import read_regular, write_whole

FILE = "SHA256SUMS"

_LINE = re.compile(r"^([0-9a-f]{64})  (\S+)$", re.MULTILINE)
_IN_AN_AUDIT = re.compile(r'"evidence":\s*("[^"\n]*"),\s*"evidence_sha256":\s*"([0-9a-f]{64})"')
_LARGEST_NBYTES = 2**28


class FolderHashes:
    """The recorded hashes of the files of one folder, which may have a copy elsewhere."""

    def __init__(self, folder: Path, copies: Path | None = None, writer: str = "") -> None:
        self._folder = folder
        self._own = folder / (f"{FILE}.{writer}" if writer else FILE)
        place = digest([platform.node(), str(folder.absolute())])
        self._copy = copies / f"{place}.sha256" if copies else None
        self._known: list[tuple[str, str]] = []
        self._copied: dict[str, str] = {}
        self._sizes: dict[Path, int] = {}

    def record(self, name: str, sha256: str) -> None:
        """Record a file before it is there; OSError if the folder takes no line."""
        _append(self._own, f"{sha256}  {name}\n")
        if self._copy is not None:
            with suppress(OSError):  # a cache that takes no files is no reason to stop
                _append(self._copy, f"{sha256}  {name}\n")

    def agree(self, name: str, sha256: str) -> bool:
        """Return whether a writer recorded this hash last, and no copy of the records differs."""
        own = sorted(self._folder.glob(f"{FILE}*"))
        sizes = {file: _size(file) for file in (*own, *([self._copy] if self._copy else []))}
        if sizes != self._sizes:
            self._known = [line for file in own for line in dict(_lines(file)).items()]
            self._copied = dict(_lines(self._copy)) if self._copy else {}
            self._sizes = sizes
        hashes = [recorded for other, recorded in self._known if other == name]
        if not hashes and not own:
            hashes = self._in_the_audit(name)
        copied = self._copied.get(name, sha256)
        return copied == sha256 and (sha256 in hashes or (not hashes and name in self._copied))

    def _in_the_audit(self, name: str) -> list[str]:
        path = f"{self._folder.name}/{name}"
        pairs = _IN_AN_AUDIT.findall(_text(self._folder.parent / "audit.json"))
        return [sha256 for quoted, sha256 in pairs if json.loads(quoted) == path]


def write_recorded(path: Path, text: str, copies: Path, writer: str = "") -> None:
    """Write a small file of results whole, and record it."""
    content = text.encode()
    try:
        FolderHashes(path.parent, copies, writer).record(
            path.name, hashlib.sha256(content).hexdigest()
        )
    except OSError as error:
        raise not_written(path, error) from error
    write_whole(path, content)


def read_recorded(path: Path, copies: Path) -> Any:
    """Return the JSON of a recorded file; ValueError or OSError if it is not as it was written."""
    content = read_regular(path, _LARGEST_NBYTES)
    if not FolderHashes(path.parent, copies).agree(path.name, hashlib.sha256(content).hexdigest()):
        raise ValueError("it is not as it was written")
    return json.loads(content)


def _append(file: Path, line: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(line)


def _lines(file: Path) -> list[tuple[str, str]]:
    return [(name, sha256) for sha256, name in _LINE.findall(_text(file))]


def _text(file: Path) -> str:
    with suppress(OSError):
        return read_regular(file, _LARGEST_NBYTES).decode(errors="replace")
    return ""


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return -1
