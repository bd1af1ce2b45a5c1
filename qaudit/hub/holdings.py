"""The commits in the shared cache, and how much of each this tool downloaded.

Sizes are those of blobs, each counted once for the commit that links to it: two commits that
share a file both count it, so that sums over commits may be more than the disk holds;
`nbytes_on_disk` counts each blob once. Only what the ledger names as ours is ever removed, and
only while no scan uses it; files of other tools are shown and left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from qaudit.checkpoints.places import hub_cache
from qaudit.errors import HubError
from qaudit.hub.cache import RepoCache, not_kept, not_read
from qaudit.hub.claims import Claims
from qaudit.hub.entries import Kind
from qaudit.hub.evict import evict
from qaudit.hub.ledger import Ledger

_FOLDER = re.compile(r"(model|dataset)s--([\w.-]+?)--([\w.-]+)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_IN_THE_MAKING = ("*.qaudit.incomplete", "*.qaudit.link")


@dataclass(frozen=True)
class Holding:
    """One commit of one repository, as far as its files lie here."""

    repo: str
    kind: Kind
    commit: str
    nbytes: int
    nbytes_brought: int  # of these, by this tool: what `remove` would free at most

    @property
    def cache(self) -> RepoCache:
        """Return the repository's folder in the shared cache."""
        return RepoCache.of(self.repo, self.kind)


def holdings() -> tuple[Holding, ...]:
    """Return every commit that has files in the shared cache."""
    ledger = Ledger()
    return tuple(
        found
        for cache, kind, repo in _repositories()
        for commit in sorted(_children(cache.folder / "snapshots"))
        if _COMMIT.fullmatch(commit.name) and (found := _held(cache, kind, repo, commit, ledger))
    )


def nbytes_on_disk(held: Iterable[Holding]) -> int:
    """Return what the blobs of repositories take, however many commits share them."""
    folders = {holding.cache.folder for holding in held}
    blobs = (blob for folder in folders for blob in _children(folder / "blobs"))
    return sum(blob.lstat().st_size for blob in blobs)


def remove(holding: Holding) -> int | None:
    """Remove what this tool downloaded of a commit; return bytes freed, None if it is in use."""
    cache, ledger = holding.cache, Ledger()
    with Claims().alone(cache.lock(f"{holding.commit}.qaudit")) as alone:
        if not alone:
            return None
        links = list(_links(cache.folder / "snapshots" / holding.commit))
        return evict(cache, ledger, [(link, link.readlink().name) for link in links])


def remembered_commit(repo: str, revision: str, kind: Kind) -> str | None:
    """Return the commit that a name stood for when the Hub was last asked; ask nothing now."""
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
    found = []
    for cache, _, _ in _repositories():
        for pattern in _IN_THE_MAKING:
            blobs = cache.folder / "blobs"
            found += [path for path in sorted(blobs.glob(pattern)) if _is_idle(cache, path)]
    return tuple(found)


def remove_leftover(path: Path) -> int:
    """Remove a file in the making; return the bytes freed. The next fetch begins it anew."""
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


def _held(cache: RepoCache, kind: Kind, repo: str, commit: Path, ledger: Ledger) -> Holding | None:
    sizes: dict[str, int] = {}
    brought: dict[str, int] = {}
    for link in _links(commit):
        name = link.readlink().name
        try:
            nbytes = (cache.folder / "blobs" / name).lstat().st_size
        except OSError:  # leads nowhere: nothing is held
            continue
        sizes[name] = nbytes
        if ledger.is_brought(cache.folder / "blobs" / name):
            brought[name] = nbytes
    if not sizes:
        return None
    return Holding(repo, kind, commit.name, sum(sizes.values()), sum(brought.values()))


def _links(commit: Path) -> Iterator[Path]:
    return (path for path in sorted(commit.rglob("*")) if path.is_symlink())


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
    except OSError as error:
        raise not_read(folder, error) from error


def _is_idle(cache: RepoCache, path: Path) -> bool:
    """Return whether no process holds the lock of the blob that a file is to become."""
    lock = FileLock(cache.lock(path.name.partition(".")[0]), timeout=0, mode=0o664)
    if not Path(lock.lock_file).parent.is_dir():
        return True
    try:
        with lock:
            return True
    except (Timeout, PermissionError):
        return False
