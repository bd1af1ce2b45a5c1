"""The commits in the shared cache: in use, and removed if this tool downloaded them.

A file is removed if the ledger names it by inode as ours, if no link leads to it but those that
are removed with it, and if no other process uses the commit. The same holds for links: where
another tool has linked to a blob that we fetched, it stays. Links are removed first and blobs
after them, so that no link leads nowhere at any moment, or after a kill. Only weights are
evicted: with config, tokenizer and index the next run needs no network to see what the checkpoint
is.

A commit in use has a shared lock on one small file, which the kernel releases when the process
ends. Where the cache may not be written or the file system has no locks, there is no claim:
nothing is evicted from the one, and on the other two scans that share a cache should not both be
given a disk budget.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock

from filelock import FileLock, Timeout

from qaudit.host import NO_LOCKS
from qaudit.hub.cache import LOCK_MODE, RepoCache, not_kept
from qaudit.hub.records import Ledger

_LOCK_TRIES, _LOCK_SECONDS = 25, 0.02

MOST_CLAIMS = 256
"""Files a process keeps open for this; the one claimed longest ago is released first."""

_FOLDER = re.compile(r"(model|dataset)s--([\w.-]+?)--([\w.-]+)", re.ASCII)
_UNFINISHED = ("*.qaudit.incomplete", "*.qaudit.link")


class Claims:
    """The commits that this process uses; may be used by several threads."""

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self._lock = Lock()

    def take(self, path: Path) -> None:
        """Claim a commit, for as long as this process lives or until it is released."""
        with self._lock:
            if path in self._handles:
                self._handles[path] = self._handles.pop(path)  # now the one claimed last
                return
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._handles[path] = _opened(path)
                fcntl.flock(self._handles[path], fcntl.LOCK_SH)
            while len(self._handles) > MOST_CLAIMS:
                os.close(self._handles.pop(next(iter(self._handles))))

    def release(self, path: Path) -> None:
        with self._lock:
            handle = self._handles.pop(path, None)
        if handle is not None:
            os.close(handle)

    @contextmanager
    def alone(self, path: Path) -> Generator[bool]:
        """Yield whether no other process uses a commit, and lock it; this process releases it."""
        self.release(path)
        try:
            handle = _opened(path)
        except OSError:
            yield not path.parent.is_dir()  # a cache that may not be written is not emptied
            return
        try:
            yield _locked(handle)
        finally:
            os.close(handle)


def _locked(handle: int) -> bool:
    """Lock a file, unless another process goes on holding it.

    A process that another thread starts has our own locks, too, until it executes its program.
    """
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_SECONDS)
        except OSError:
            return True  # a file system without locks
        else:
            return True
    return False


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, LOCK_MODE)


def evict(
    cache: RepoCache,
    ledger: Ledger,
    weights: Sequence[tuple[Path, str]],
    *,
    keep_links: Collection[Path] = (),
    keep_blobs: Collection[str] = (),
) -> int:
    """Remove links and the blobs they lead to, as far as they are ours; return the bytes freed."""
    with ExitStack() as stack:
        locked = {blob for _, blob in weights if _is_free(cache, blob, stack)}
        try:
            for link in (p for p, blob in weights if blob in locked and p not in keep_links):
                if link.is_symlink() and ledger.has(link):
                    link.unlink(missing_ok=True)
            in_use = {link.readlink().name for link in cache.links() if link.is_symlink()}
            removable = locked - set(keep_blobs)
            paths = [path for path in map(cache.blob, removable - in_use) if ledger.has(path)]
            paths += [path for path in map(cache.partial, removable) if path.is_file()]
            freed = sum(path.stat().st_size for path in paths)
            for path in paths:
                path.unlink()
            return freed
        except OSError as error:
            raise not_kept(cache.folder, error) from error


def _is_free(cache: RepoCache, blob: str, stack: ExitStack) -> bool:
    """Take the lock of a blob, unless it is being fetched."""
    path = cache.lock(blob)
    if not path.parent.is_dir():  # no tool with locks has written there
        return False
    try:
        stack.enter_context(FileLock(path, timeout=0, mode=LOCK_MODE, fallback_to_soft=False))
    except (Timeout, PermissionError):
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise not_kept(path, error) from error
    return True
