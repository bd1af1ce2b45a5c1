"""What this tool brought into the shared cache, and what it has found to be whole.

One file of lines, which are only ever added. A line ties what is known to a file as it was then:
its path, size, time of change and inode. A file that anyone replaced or changed since is another
file, so a line can go stale and cannot become wrong: what is not known to be ours is never
removed, and what is not known to be whole is hashed again.

Several processes write at once: a line is one append. A process that is killed in the middle of
one leaves a torn line, which is skipped; every line begins on a new one. What was given up: the
file only grows (150 bytes for a file that was fetched), and bytes that rot on the disk without
any write are not noticed once they were whole.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from qaudit.checkpoints.places import own_cache
from qaudit.hub.cache import not_kept


@dataclass(frozen=True)
class Stamp:
    """What tells a file from every other that lay or will lie in its place."""

    nbytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """Return the stamp of a file, and of the link itself if it is one."""
        found = path.lstat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)

    def fits(self, path: Path) -> bool:
        """Say whether the very same file lies there."""
        try:
            return Stamp.of(path) == self
        except (FileNotFoundError, NotADirectoryError):
            return False


@dataclass(frozen=True)
class _Entry:
    stamp: Stamp
    identity: str  # what the bytes were found to be; for a link, the blob it leads to
    brought: bool


class Ledger:
    """The lines of one file; may be used by several threads and processes."""

    def __init__(self, path: Path | None = None) -> None:
        """Read nothing yet."""
        self.path = path or own_cache() / "brought.jsonl"
        self._entries: dict[str, _Entry] = {}
        self._read_to = 0
        self._lock = Lock()

    def enter(self, path: Path, stamp: Stamp, identity: str, *, brought: bool) -> None:
        """Write down that the file of this stamp, once it lies at `path`, is whole, and whose."""
        line = [_key(path), stamp.nbytes, stamp.mtime_ns, stamp.inode, identity, brought]
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
        """Say whether the file that lies there now was put there by this tool."""
        entry = self._entry(path)
        return entry is not None and entry.brought and entry.stamp.fits(path)

    def is_whole(self, path: Path, identity: str) -> bool:
        """Say whether the file that lies there now was found to be what `identity` says."""
        entry = self._entry(path)
        return entry is not None and entry.identity == identity and entry.stamp.fits(path)

    def _entry(self, path: Path) -> _Entry | None:
        with self._lock:
            self._read_on()
            return self._entries.get(_key(path))

    def _read_on(self) -> None:
        """Read the lines that came since the last time, by whichever process."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._read_to:  # somebody began it anew
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
    """Name a file by where its folder really lies; a link keeps its own name."""
    return str(path.parent.resolve() / path.name)


def _parsed(line: bytes) -> tuple[str, _Entry] | None:
    try:
        values: Any = json.loads(line)
        path, nbytes, mtime_ns, inode, identity, brought = values
    except (ValueError, TypeError):
        return None
    stamp = Stamp(nbytes, mtime_ns, inode)
    return (path, _Entry(stamp, identity, brought is True)) if isinstance(path, str) else None
