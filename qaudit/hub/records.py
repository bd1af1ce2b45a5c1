"""What qaudit keeps of the Hub in its own cache: answers, and a list of the files it downloaded.

Everything here can be requested or computed again, so that a damaged file is as good as absent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from qaudit.checkpoints.places import own_cache
from qaudit.checkpoints.stamps import Stamp
from qaudit.hub.cache import not_kept
from qaudit.types import digest
from qaudit.whole import partial_name

VERSION = 1
_LONGEST_LINE_NBYTES = 1 << 14

_File = tuple[int, int, int]
"""Size, time of modification and inode."""


class AnswerStore:
    """A folder of answers, one small JSON file each.

    File names are digests, so that no name from the network is ever a path. The key is written
    inside and compared when it is read, so that a file copied to another place has no effect. A
    file is written under another name and moved. An answer that the disk does not take is fetched
    again the next time; a message says so once, and the work goes on.
    """

    def __init__(self, folder: Path, say: Callable[[str], object]) -> None:
        self._folder, self._say = folder, say
        self._warned = False

    def path(self, table: str, key: Sequence[str]) -> Path:
        return self._folder / f"v{VERSION}" / table / f"{digest([table, *key])}.json"

    def get(self, table: str, key: Sequence[str]) -> Any:
        try:
            record = json.loads(self.path(table, key).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(record, dict) or record.get("key") != [table, *key]:
            return None
        return record.get("value")

    def put(self, table: str, key: Sequence[str], value: Any) -> None:
        """Write an answer so that it is there whole or not at all."""
        path = self.path(table, key)
        partial = partial_name(path)
        text = json.dumps({"key": [table, *key], "value": value}, separators=(",", ":"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            if not self._warned:
                why = (error.strerror or str(error)).lower()
                self._say(f"answers of the Hub cannot be kept in `{self._folder}`: {why}")
            self._warned = True
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


class Ledger:
    """The files of the shared cache that this tool downloaded: only those may be evicted.

    A file of lines, which are only ever appended, by several threads and processes. A line ties a
    path to the file that was there: its size, time of modification and inode. A file that was
    replaced since is another file, so a line can go stale and cannot become wrong. A rename changes
    the time of change, and a line is written before its file is renamed into place, so that time is
    not compared. A torn line is skipped; every line begins on a new one. Given up: the file only
    grows (150 bytes for a file that was fetched).
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or own_cache() / "brought.jsonl"
        self._entries: dict[str, _File | None] = {}
        self._read_to = 0
        self._lock = Lock()

    def add(self, path: Path, stamp: Stamp, identity: str, *, downloaded: bool) -> None:
        """Append that the file of this stamp, once it is at `path`, was downloaded, or was not."""
        line = [_key(path), *_file(stamp), identity, downloaded]
        data = f"\n{json.dumps(line)}\n".encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                while data:  # a short write means a full disk, and the next write raises
                    data = data[os.write(file, data) :]
            finally:
                os.close(file)
        except OSError as error:
            raise not_kept(self.path, error) from error

    def has(self, path: Path) -> bool:
        """Return whether this tool downloaded the file that is at `path` now."""
        with self._lock:
            self._read_on()
            entry = self._entries.get(_key(path))
        try:
            return entry is not None and _file(Stamp.of_link(path)) == entry
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _read_on(self) -> None:
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
        self._entries |= filter(None, map(_parsed, whole.splitlines()))
        self._read_to += len(whole)


def _key(path: Path) -> str:
    return str(path.parent.resolve() / path.name)  # a link keeps its own name


def _file(stamp: Stamp) -> _File:
    return stamp.nbytes, stamp.modified_ns, stamp.inode


def _parsed(line: bytes) -> tuple[str, _File | None] | None:
    if len(line) > _LONGEST_LINE_NBYTES:
        return None
    try:
        path, nbytes, modified_ns, inode, _, downloaded = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(path, str):
        return None
    return path, (nbytes, modified_ns, inode) if downloaded is True else None
