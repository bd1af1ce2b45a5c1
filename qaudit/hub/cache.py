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
import itertools
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from filelock import FileLock, Timeout

from qaudit.checkpoints.stamps import Stamp, own_cache, repo_folder
from qaudit.errors import HubError, MachineError, not_written
from qaudit.host import NO_LOCKS
from qaudit.hub.answers import RESUME, HubFile, Kind, is_commit

BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
LOCK_MODE = 0o664  # the client's: several users may share a cache
_NEVER_IN_A_PATH = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
_LOOK_AGAIN_SECONDS = 0.5
_LOCK_TRIES, _LOCK_SECONDS = 25, 0.02

MOST_CLAIMS = 256
"""Files a process keeps open for this; the one claimed longest ago is released first."""

_File = tuple[int, int, int]
"""Size, time of modification and inode."""


@dataclass(frozen=True)
class Snapshot:
    """One commit of a repository in the shared cache, whether that has it or not."""

    repo: str
    kind: Kind = "model"
    commit: str = ""
    revision: str = ""
    label: str = ""  # its name for messages

    @property
    def folder(self) -> Path:
        return repo_folder(self.repo, self.kind)

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

    def lock(self, name: str) -> Path:
        """Return the path of the lock that the client takes before it fetches a blob."""
        return self.folder.parent / ".locks" / self.folder.name / f"{name}.lock"

    @property
    def claim(self) -> Path:
        """Return the file whose lock means that this commit is in use."""
        return self.lock(f"{self.commit}.qaudit")

    def pointer(self, path: str) -> Path:
        """Return the path of a file of the commit, if it stays in the snapshot."""
        odd = {"", ".", ".."} & set(path.split("/")) or _NEVER_IN_A_PATH.search(path)
        if odd or not is_commit(self.commit):
            raise HubError(
                f"`{ascii(path)[1:-1][:80]}` at `{ascii(self.commit)[1:-1][:80]}` is not a plain "
                "path at a full commit",
                hint="nothing is written there; see whether `HF_ENDPOINT` is a Hub",
            )
        return self.folder / "snapshots" / self.commit / path

    def nbytes_missing(self, placed: Iterable[tuple[HubFile, str]]) -> int:
        """Return how many bytes are not in the cache, by sizes alone."""
        missing = {}
        for file, path in placed:
            if file_size(self.pointer(path)) == file.nbytes:
                continue
            if file_size(self.blob(file.blob)) != file.nbytes:
                have = file_size(self.partial(file.blob)) or 0
                missing[file.blob] = file.nbytes - (have if have <= file.nbytes else 0)
        return sum(missing.values())

    def link(self, path: str, blob: str, ledger: Ledger, *, downloaded: bool) -> None:
        """Make a file of the commit point at a blob, all at once.

        The link is made under a passing name and renamed, because a rename keeps the inode: what
        the ledger has by inode is true from the moment on at which the link is there.
        """
        pointer = self.pointer(path)
        passing = self.blob(blob).with_name(f"{blob}.{secrets.token_hex(8)}.incomplete")
        step = self.folder / "snapshots"
        for part in ("", *pointer.relative_to(step).parts[:-1]):
            step = step / part
            if step.is_symlink() or (step.exists() and not step.is_dir()):
                raise HubError(
                    f"`{step}` is not a folder of its own, so `{pointer.name}` is not put there",
                    hint="remove it from the cache; it was not made by a tool of the Hub",
                )
        try:
            pointer.parent.mkdir(parents=True, exist_ok=True)
            passing.symlink_to(Path(*[".."] * (path.count("/") + 2), "blobs", blob))
            ledger.add(
                pointer, Stamp.of(passing, follow_symlinks=False), blob, downloaded=downloaded
            )
            passing.replace(pointer)
        except OSError as error:
            raise not_kept(pointer, error) from error


@contextmanager
def locked(path: Path, on_wait: Callable[[int], object]) -> Generator[None]:
    """Hold a lock of the cache; while another process holds it, `on_wait` is called with a count.

    On a file system without locks nothing is held: racing downloads write equal bytes.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, mode=LOCK_MODE, fallback_to_soft=False)
        for waits in itertools.count(1):
            try:
                lock.acquire(timeout=_LOOK_AGAIN_SECONDS, poll_interval=0.05)
                break
            except Timeout:
                on_wait(waits)
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

    def add(self, path: Path, stamp: Stamp, identity: str, *, downloaded: bool) -> None:
        """Append that the file of this stamp, once it is at `path`, was downloaded, or was not."""
        line = [_key(path), *_file(stamp), identity, downloaded]
        data = f"\n{json.dumps(line)}\n".encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                while data:  # a short write means a full disk, and the next write raises
                    data = data[file.write(data) :]
        except OSError as error:
            raise not_kept(self.path, error) from error

    def has(self, path: Path) -> bool:
        """Return whether this tool downloaded the file that is at `path` now."""
        begin, entry = f"[{json.dumps(_key(path))},".encode(), None
        try:
            for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
                if line.startswith(begin):
                    with suppress(ValueError, TypeError, RecursionError):  # a torn line
                        _, nbytes, modified_ns, inode, _, downloaded = json.loads(line)
                        entry = (nbytes, modified_ns, inode) if downloaded is True else None
        except OSError as error:
            raise not_kept(self.path, error) from error
        try:
            return entry is not None and _file(Stamp.of(path, follow_symlinks=False)) == entry
        except (FileNotFoundError, NotADirectoryError):
            return False


def _key(path: Path) -> str:
    return str(path.parent.resolve() / path.name)  # a link keeps its own name


def _file(stamp: Stamp) -> _File:
    return stamp.nbytes, stamp.modified_ns, stamp.inode


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
            for _ in range(_LOCK_TRIES):
                # A process that another thread starts has our locks until it executes its program.
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(_LOCK_SECONDS)
                    continue
                except OSError:
                    pass  # a file system without locks
                yield True
                return
            yield False
        finally:
            os.close(handle)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, LOCK_MODE)


def evict(
    cache: Snapshot,
    ledger: Ledger,
    links: Collection[tuple[Path, str]],
    keep: Collection[tuple[Path, str]] = (),
) -> int:
    """Remove links and the blobs they lead to, as far as they are ours; return the bytes freed."""
    with ExitStack() as stack:
        locked = set[str]()
        for blob in {blob for _, blob in links}:
            path = cache.lock(blob)
            if not path.parent.is_dir():  # no tool with locks has written there
                continue
            lock = FileLock(path, timeout=0, mode=LOCK_MODE, fallback_to_soft=False)
            try:
                stack.enter_context(lock)
            except (Timeout, PermissionError):
                continue  # it is being fetched
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise not_kept(path, error) from error
            locked.add(blob)
        try:
            for link, blob in set(links) - set(keep):
                if blob in locked and link.is_symlink() and ledger.has(link):
                    link.unlink(missing_ok=True)
            # Of every file of every snapshot, whichever tool wrote it.
            inside = os.walk(cache.folder / "snapshots")
            every = (Path(folder, name) for folder, _, names in inside for name in names)
            in_use = {link.readlink().name for link in every if link.is_symlink()}
            removable = locked - {blob for _, blob in keep}
            paths = [path for path in map(cache.blob, removable - in_use) if ledger.has(path)]
            paths += [path for path in map(cache.partial, removable) if path.is_file()]
            freed = sum(path.stat().st_size for path in paths)
            for path in paths:
                path.unlink()
            return freed
        except OSError as error:
            raise not_kept(cache.folder, error) from error
