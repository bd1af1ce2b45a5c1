"""Which files of the shared cache this tool downloaded: only those may be evicted.

One file of lines, which are only ever added. A line ties a path to the file that was there: its
size, time of modification and inode. A file that was replaced since is another file, so a line
can go stale and cannot become wrong. Whether a file is still whole is not stored here: that is
the memory of hashes (`checkpoints.stamps`). A rename changes the time of change, and a line is
written before its file is renamed into place, so that time is not compared here.

Several processes write at once: a line is one append. A process that is killed in the middle of
one leaves a torn line, which is skipped; every line begins on a new one. Given up: the file only
grows (150 bytes for a file that was fetched).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from threading import Lock
from typing import Any

from qaudit.checkpoints.places import own_cache
from qaudit.checkpoints.stamps import Stamp
from qaudit.hub.cache import not_kept

_File = tuple[int, int, int]
"""Size, time of modification and inode."""

_LONGEST_LINE_NBYTES = 1 << 14


class Ledger:
    """The lines of one file; may be used by several threads and processes."""

    def __init__(self, path: Path | None = None) -> None:
        """Read nothing yet."""
        self.path = path or own_cache() / "brought.jsonl"
        self._entries: dict[str, _File | None] = {}
        self._read_to = 0
        self._lock = Lock()

    def enter(self, path: Path, stamp: Stamp, identity: str, *, brought: bool) -> None:
        """Append that the file of this stamp, once it is at `path`, was downloaded, or was not."""
        line = [_key(path), *_file(stamp), identity, brought]
        data = f"\n{json.dumps(line)}\n".encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                while data:  # more than once only where space runs out, which the next one says
                    data = data[os.write(file, data) :]
            finally:
                os.close(file)
        except OSError as error:
            raise not_kept(self.path, error) from error

    def is_brought(self, path: Path) -> bool:
        """Return whether the file that is there now was put there by this tool."""
        with self._lock:
            self._read_on()
            entry = self._entries.get(_key(path))
        try:
            return entry is not None and _file(Stamp.of_link(path)) == entry
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _read_on(self) -> None:
        """Read the lines that any process appended since the last time."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._read_to:  # it was replaced
                    self._entries, self._read_to = {}, 0
                file.seek(self._read_to)
                data = file.read()
        except FileNotFoundError:
            self._entries, self._read_to = {}, 0
            return
        except OSError as error:
            raise not_kept(self.path, error) from error
        whole = data.rpartition(b"\n")[0]
        for line in whole.splitlines():
            if entry := _parsed(line):
                self._entries[entry[0]] = entry[1]
        self._read_to += len(whole)


def _key(path: Path) -> str:
    """Name a file by the real place of its folder; a link keeps its own name."""
    return str(path.parent.resolve() / path.name)


def _file(stamp: Stamp) -> _File:
    return stamp.nbytes, stamp.modified_ns, stamp.inode


def _parsed(line: bytes) -> tuple[str, _File | None] | None:
    if len(line) > _LONGEST_LINE_NBYTES:
        return None
    try:
        values: Any = json.loads(line)
        path, nbytes, modified_ns, inode, _, brought = values
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(path, str):
        return None
    return path, (nbytes, modified_ns, inode) if brought is True else None
