"""The commits in the shared cache: in use, listed, and removed if this tool downloaded them.

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

Sizes are those of blobs, each counted once for the commit that links to it, so that sums over
commits may be more than the disk holds; `nbytes_on_disk` counts each blob once.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from filelock import FileLock, Timeout

from qaudit.checkpoints.places import hub_cache
from qaudit.errors import HubError
from qaudit.host import NO_LOCKS
from qaudit.hub.answers import Kind, is_commit
from qaudit.hub.cache import LOCK_MODE, RepoCache, not_kept, not_read
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


@dataclass(frozen=True)
class Holding:
    """One commit of one repository, as far as its files are in the cache."""

    repo: str
    kind: Kind
    commit: str
    nbytes: int
    nbytes_downloaded: int  # of these, by this tool: what `remove` would free at most

    @property
    def cache(self) -> RepoCache:
        return RepoCache.of(self.repo, self.kind)


def holdings() -> tuple[Holding, ...]:
    ledger = Ledger()
    commits = (
        _holding(cache, kind, repo, commit, ledger)
        for cache, kind, repo in _repositories()
        for commit in sorted(_children(cache.folder / "snapshots"))
        if is_commit(commit.name)
    )
    return tuple(holding for holding in commits if holding is not None)


def nbytes_on_disk(held: Iterable[Holding]) -> int:
    """Return the bytes of the blobs of repositories, however many commits share them."""
    folders = {holding.cache.folder for holding in held}
    blobs = (blob for folder in folders for blob in _children(folder / "blobs"))
    return sum(blob.lstat().st_size for blob in blobs)


def remove(holding: Holding) -> int | None:
    """Remove what this tool downloaded of a commit; return bytes freed, None if it is in use."""
    cache = holding.cache
    with Claims().alone(cache.lock(f"{holding.commit}.qaudit")) as alone:
        if not alone:
            return None
        links = list(_links(cache.folder / "snapshots" / holding.commit))
        return evict(cache, Ledger(), [(link, link.readlink().name) for link in links])


def remembered_commit(repo: str, revision: str, kind: Kind) -> str | None:
    """Return the commit of a name as the Hub last gave it, without a request."""
    from qaudit.hub.client import Client
    from qaudit.hub.listing import Listing

    client = Client.from_environment()
    client.offline = True
    try:
        return Listing(client).commit(repo, revision, kind)
    except HubError:
        return None


def leftovers() -> tuple[Path, ...]:
    """Return unfinished files that no process is writing any more."""
    return tuple(
        path
        for cache, _, _ in _repositories()
        for pattern in _UNFINISHED
        for path in sorted((cache.folder / "blobs").glob(pattern))
        if _is_idle(cache, path)
    )


def remove_leftover(path: Path) -> int:
    """Remove an unfinished file; return the bytes freed. The next fetch begins it anew."""
    nbytes = path.lstat().st_size
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise not_kept(path, error) from error
    return nbytes


def _repositories() -> Iterator[tuple[RepoCache, Kind, str]]:
    for folder in sorted(_children(hub_cache())):
        if match := _FOLDER.fullmatch(folder.name):
            kind: Kind = "model" if match[1] == "model" else "dataset"
            yield RepoCache(folder), kind, f"{match[2]}/{match[3]}"


def _holding(
    cache: RepoCache, kind: Kind, repo: str, commit: Path, ledger: Ledger
) -> Holding | None:
    sizes: dict[Path, int] = {}
    for link in _links(commit):
        blob = cache.folder / "blobs" / link.readlink().name
        with suppress(OSError):  # the link leads nowhere
            sizes[blob] = blob.lstat().st_size
    if not sizes:
        return None
    downloaded = sum(nbytes for blob, nbytes in sizes.items() if ledger.has(blob))
    return Holding(repo, kind, commit.name, sum(sizes.values()), downloaded)


def _links(commit: Path) -> Iterator[Path]:
    return (path for path in sorted(commit.rglob("*")) if path.is_symlink())


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    except OSError as error:
        raise not_read(folder, error) from error


def _is_idle(cache: RepoCache, path: Path) -> bool:
    """Return whether no process holds the lock of the blob that a file is to become."""
    if not cache.lock(path.name).parent.is_dir():
        return True
    with ExitStack() as stack:
        return _is_free(cache, path.name.partition(".")[0], stack)
