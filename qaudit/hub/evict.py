"""Remove weights from the shared cache: those this tool downloaded, and no others.

A file is removed if the ledger names it by inode as ours, if no link leads to it but those that
are removed with it, and if no other process uses the commit. The same holds for links: where
another tool has linked to a blob that we fetched, it stays. Links are removed first and blobs
after them, so that no link leads nowhere at any moment, or after a kill.

Only weights are removed. The config, the tokenizer and the index are small, and with them the
next run needs no network to see what the checkpoint is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from filelock import FileLock, Timeout

from qaudit.hub.cache import RepoCache, not_kept
from qaudit.hub.ledger import Ledger


def evict(
    cache: RepoCache,
    ledger: Ledger,
    weights: Sequence[tuple[Path, str]],
    *,
    kept_links: Collection[Path] = (),
    kept_blobs: Collection[str] = (),
) -> int:
    """Remove links and the blobs they lead to, as far as they are ours; return the bytes freed."""
    with ExitStack() as stack:
        going = {b for _, b in weights if _is_free(cache, b, stack)}
        try:
            for link in (p for p, blob in weights if blob in going and p not in kept_links):
                if link.is_symlink() and ledger.is_brought(link):
                    link.unlink(missing_ok=True)
            going -= set(kept_blobs)
            ours = [cache.blob(b) for b in going - set(_linked(cache))]
            ours = [path for path in ours if ledger.is_brought(path)]
            ours += [path for b in going if (path := cache.partial(b)).is_file()]
            freed = sum(path.stat().st_size for path in ours)
            for path in ours:
                path.unlink()
            return freed
        except OSError as error:
            raise not_kept(cache.folder, error) from error


def _is_free(cache: RepoCache, blob: str, stack: ExitStack) -> bool:
    """Take the lock of a blob, unless it is being fetched."""
    path = cache.lock(blob)
    if not path.parent.is_dir():  # no tool with locks has written there
        return False
    lock = FileLock(path, timeout=0, mode=0o664)
    try:
        stack.enter_context(lock)
    except (Timeout, PermissionError):
        return False
    return True


def _linked(cache: RepoCache) -> Iterator[str]:
    """Yield the name of every blob that a file of a snapshot leads to."""
    for path in cache.links():
        if path.is_symlink():
            yield path.readlink().name
