"""Take a checkpoint's weights out of the shared cache again: those this tool brought, no others.

A file goes if the ledger knows it by inode as ours, if no link leads to it but the ones that go
with it, and if nobody is using the commit. Links are ours or not like files: where somebody
else's client has linked to a blob that we had fetched, it stays. Links go first and blobs after
them, so that whoever looks in between, or after a kill, finds no link that leads nowhere.

Only weights go. The config, the tokenizer and the index are small, and with them the next run
needs no network to see what the checkpoint is.
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
    """Take the lock of a blob, unless somebody is bringing it at this moment."""
    path = cache.lock(blob)
    if not path.parent.is_dir():  # whatever lies there was never brought by a tool with locks
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
