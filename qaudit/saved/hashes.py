"""The sha256 of every file of evidence, recorded when it is written: an edited file is not used.

The lines are those of `sha256sum`, in `SHA256SUMS` of the folder, and again in a file of the
user's cache whose name is a hash of machine and folder: an edit of the folder does not reach it.
A file is used again if it has a record and every record agrees. Folders of the first version have
no `SHA256SUMS`: there the hashes in `audit.json` are the record.
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

    def __init__(self, folder: Path, copies: Path | None = None) -> None:
        self._folder = folder
        place = digest([platform.node(), str(folder.absolute())])
        self._files = [folder / FILE, *([copies / f"{place}.sha256"] if copies else [])]
        self._known: list[dict[str, str]] = []
        self._sizes: list[int] = []

    def record(self, name: str, sha256: str) -> None:
        """Record a file before it is there; OSError if the folder takes no line."""
        own, *copies = self._files
        _append(own, f"{sha256}  {name}\n")
        for copy in copies:
            with suppress(OSError):  # a cache that takes no files is no reason to stop
                _append(copy, f"{sha256}  {name}\n")

    def agree(self, name: str, sha256: str) -> bool:
        """Return whether the file has records, and each is this hash."""
        sizes = [_size(file) for file in self._files]
        if sizes != self._sizes:
            self._known = [dict(_lines(file)) for file in self._files]
            self._sizes = sizes
        known = [names[name] for names in self._known if name in names]
        if not known and not self._files[0].exists():
            known = self._in_the_audit(name)
        return bool(known) and set(known) == {sha256}

    def _in_the_audit(self, name: str) -> list[str]:
        path = f"{self._folder.name}/{name}"
        pairs = _IN_AN_AUDIT.findall(_text(self._folder.parent / "audit.json"))
        return [sha256 for quoted, sha256 in pairs if json.loads(quoted) == path]


def write_recorded(path: Path, text: str, copies: Path) -> None:
    """Write a small file of results whole, and record it."""
    content = text.encode()
    try:
        FolderHashes(path.parent, copies).record(path.name, hashlib.sha256(content).hexdigest())
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
