"""The cache that every Hugging Face tool shares: where a repository's files are in it.

    models--org--name/blobs/<sha256, or git id>       the bytes, named by what they are
    models--org--name/snapshots/<commit>/<path>       a relative link into blobs
    .locks/models--org--name/<blob>.lock              held while a blob is fetched

What is written here is what the client itself would have written, so that it finds the files,
and the other way round. An unfinished blob is `<blob>.incomplete`, as older clients had it (newer
ones put a random part before that and resume none): `hf cache prune` removes all of them. A commit
in use is locked under `<commit>.qaudit.lock`.
Names of branches and tags (`refs/`) are not written: a checkpoint is known by its commit.

Paths come from a listing, and a listing from a stranger. A path must be plain, and no folder
on the way to a link may itself be a link: nothing is ever written outside `snapshots`.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from qaudit.checkpoints.places import hub_cache, repo_folder
from qaudit.errors import HubError, MachineError, not_written
from qaudit.host import NO_LOCKS
from qaudit.hub.answers import Kind, is_commit
from qaudit.hub.failures import RESUME

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
LOCK_MODE = 0o664  # the client's: several users may share a cache
_NEVER_IN_A_PATH = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
_LOOK_AGAIN_SECONDS = 0.5


@dataclass(frozen=True)
class RepoCache:
    """The folder of one repository in the shared cache, whether it exists or not."""

    folder: Path

    @classmethod
    def of(cls, repo: str, kind: Kind = "model") -> RepoCache:
        return cls(repo_folder(repo, kind))

    def blob(self, name: str) -> Path:
        """Return the path of a blob, if that is the name of one."""
        if not BLOB.fullmatch(name):
            raise HubError(
                f"`{ascii(name)[1:-1][:80]}` is not the hash of a file",
                hint="see whether `HF_ENDPOINT` is a Hub",
            )
        return self.folder / "blobs" / name

    def partial(self, name: str) -> Path:
        """Return the path of an unfinished blob, where the next process finds it."""
        return self.blob(name).with_name(f"{name}.incomplete")

    def pointer(self, commit: str, path: str) -> Path:
        """Return the path of a file of a commit, if it stays in the snapshot."""
        odd = {"", ".", ".."} & set(path.split("/")) or _NEVER_IN_A_PATH.search(path)
        if odd or not is_commit(commit):
            raise HubError(
                f"`{ascii(path)[1:-1][:80]}` at `{ascii(commit)[1:-1][:80]}` is not a plain path "
                "at a full commit",
                hint="nothing is written there; see whether `HF_ENDPOINT` is a Hub",
            )
        return self.folder / "snapshots" / commit / path

    def lock(self, name: str) -> Path:
        """Return the path of the lock that the client takes before it fetches a blob."""
        return self.folder.parent / ".locks" / self.folder.name / f"{name}.lock"

    def links(self) -> Iterator[Path]:
        """Yield every file of every snapshot, whichever tool wrote it."""
        for folder, _, files in os.walk(self.folder / "snapshots"):
            yield from (Path(folder, name) for name in files)

    def link(self, commit: str, path: str, blob: str, note: Callable[[Path, Path], None]) -> None:
        """Make a file of a commit point at a blob, all at once; `note` is called just before.

        The link is made under a passing name and renamed, because a rename keeps the inode: what
        is noted by inode is true from the moment on at which the link is there.
        """
        pointer = self.pointer(commit, path)
        passing = self.blob(blob).with_name(f"{blob}.{secrets.token_hex(8)}.incomplete")
        self._must_stay_inside(pointer)
        try:
            pointer.parent.mkdir(parents=True, exist_ok=True)
            passing.symlink_to(Path(*[".."] * (path.count("/") + 2), "blobs", blob))
            note(passing, pointer)
            passing.replace(pointer)
        except OSError as error:
            raise not_kept(pointer, error) from error

    def _must_stay_inside(self, pointer: Path) -> None:
        """Refuse a path to a link that leads through links, or through a file."""
        step = self.folder / "snapshots"
        for part in ("", *pointer.relative_to(step).parts[:-1]):
            step = step / part
            if step.is_symlink() or (step.exists() and not step.is_dir()):
                raise HubError(
                    f"`{step}` is not a folder of its own, so `{pointer.name}` is not put there",
                    hint="remove it from the cache; it was not made by a tool of the Hub",
                )


def cached_repo(repo: str, kind: Kind) -> CachedRepoInfo | None:
    """Return what the client finds of a repository in the shared cache; refuse a damaged one."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        scan = scan_cache_dir(hub_cache())
    except (CacheNotFound, ValueError):
        return None
    except OSError as error:
        raise not_read(hub_cache(), error) from error
    folder = repo_folder(repo, kind)
    held = next((r for r in scan.repos if r.repo_path.name == folder.name), None)
    if held is None and (folder / "snapshots").is_dir():
        why = next((str(w) for w in scan.warnings if folder.name in str(w)), "it cannot be read")
        raise HubError(
            f"what the cache has of `{repo}` is damaged: {' '.join(why.split())}",
            hint=f"fetch it once more while online, or remove `{folder}`",
        )
    return held


@contextmanager
def locked(path: Path, on_wait: Callable[[], object]) -> Generator[None]:
    """Hold a lock of the cache; `on_wait` is called repeatedly while another process holds it.

    On a file system without locks nothing is held: racing downloads write equal bytes.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, mode=LOCK_MODE, fallback_to_soft=False)
        while True:
            try:
                lock.acquire(timeout=_LOOK_AGAIN_SECONDS, poll_interval=0.05)
                break
            except Timeout:
                on_wait()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise not_kept(path, error) from error
    try:
        yield
    finally:
        lock.release()


def file_size(path: Path) -> int | None:
    """Return the size of a file, through links; None where there is none."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise not_read(path, error) from error


def not_kept(path: Path, error: OSError) -> MachineError:
    failure = not_written(path, error)
    if "no space" in failure.message:
        return MachineError(failure.message, hint=f"free some space, then {RESUME}")
    return MachineError(
        failure.message,
        hint="fix that, or name another folder with `HF_HUB_CACHE` or `QAUDIT_CACHE`",
    )


def not_read(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"`{path}` cannot be read: {(error.strerror or str(error)).lower()}",
        hint="check its permissions; if the disk is failing, remove the file",
    )
