"""Commits in use: what one scan reads, another must not evict.

A claim is a shared lock on one small file per commit. The kernel lets go of it when the process
ends, however it ends. Where the cache may not be written or the file system has no locks, there
is no claim: nothing is evicted from the one, and on the other two scans that share a cache
should not both be given a disk budget.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

MOST_HELD = 256
"""Files a process keeps open for this; the one claimed longest ago is let go first."""


class Claims:
    """The commits that this process uses; may be used by several threads."""

    def __init__(self) -> None:
        """Claim nothing yet."""
        self._held: dict[Path, int] = {}
        self._lock = Lock()

    def take(self, path: Path) -> None:
        """Claim a commit, for as long as this process lives or until it is released."""
        with self._lock:
            if path in self._held:
                self._held[path] = self._held.pop(path)  # now the one claimed last
                return
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._held[path] = _opened(path)
                fcntl.flock(self._held[path], fcntl.LOCK_SH)
            while len(self._held) > MOST_HELD:
                os.close(self._held.pop(next(iter(self._held))))

    def release(self, path: Path) -> None:
        """Let a commit go."""
        with self._lock:
            handle = self._held.pop(path, None)
        if handle is not None:
            os.close(handle)

    @contextmanager
    def alone(self, path: Path) -> Generator[bool]:
        """Yield whether no other process uses a commit, and hold it; this one releases it."""
        self.release(path)
        try:
            handle = _opened(path)
        except OSError:
            yield not path.parent.is_dir()  # a cache that may not be written is not emptied
            return
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:
                pass  # a file system without locks
            yield True
        finally:
            os.close(handle)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
