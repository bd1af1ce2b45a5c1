"""One file over a bad line: resumed until it is whole, and used once its hash is right.

Bytes are written as they come under the blob's passing name, at their own place: a process that
is killed leaves what it had, and the next one hashes that and requests the rest. Two processes on
a file system without working locks write the same bytes to the same places. The hash runs along,
so a file is read back only where an earlier process had begun it.

A transfer that makes progress may break off as often as it likes, within reason; one that does
not is tried a few times, with longer and longer pauses or those that the server requests. A file
that is complete and wrong is removed and fetched once more from its beginning: the damage is as
likely on this disk as on the server's, and finding out which is not worth a third time.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Protocol

from qaudit.core.sizes import part_of, size
from qaudit.errors import HubError, MachineError, UnreachableError
from qaudit.hub.answers import HubFile, Kind
from qaudit.hub.cache import file_size, not_kept, not_read
from qaudit.hub.failures import LONGEST_WAIT_SECONDS, RESUME, DroppedError, wait_seconds

_PIECE_NBYTES = 1 << 20
_MOST_BREAKS = 1000  # and one more for each MiB: a proxy may cut every transfer short


class Source(Protocol):
    """The part of the Hub's client that is used here."""

    def download(
        self, repo: str, commit: str, file: HubFile, start: int, *, kind: Kind = "model"
    ) -> AbstractContextManager[Iterator[bytes]]:
        """Stream a file from a byte on, in one attempt."""


@dataclass(frozen=True)
class Download:
    """Where a file comes from, and the callbacks for its progress."""

    source: Source
    repo: str
    commit: str
    kind: Kind = "model"
    revision: str | None = None
    tries: int = 6
    advance: Callable[[int], object] = lambda nbytes: None  # of the file; negative: it was wrong
    receive: Callable[[int], object] = lambda nbytes: None  # over the network
    say: Callable[[str], object] = lambda text: None
    pause: Callable[[float], object] = lambda seconds: None
    check_stopped: Callable[[], object] = lambda: None  # raises `Interrupted`

    def where(self, file: HubFile) -> str:
        return f"`{file.path}` of `{self.repo}` at `{self.revision or self.commit}`"


class Hash(Protocol):
    """The part of a `hashlib` hash that is used here."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Hash more bytes."""

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far."""


def new_hash(file: HubFile) -> Hash:
    """Begin the hash that names a file's blob: sha256, or git's own of the bytes and length."""
    if file.sha256 is not None:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.nbytes, usedforsecurity=False)


def is_right(path: Path, file: HubFile, download: Download) -> bool:
    try:
        with path.open("rb", buffering=0) as handle:
            digest, nbytes = _hashed(handle, file, download)
    except OSError as error:
        raise not_read(path, error) from error
    if digest.hexdigest() == file.blob:
        return True
    download.advance(-nbytes)
    return False


def fetch(file: HubFile, partial: Path, download: Download) -> None:
    """Fetch a file to its passing name, whole, checked and on the disk."""
    for is_first in (True, False):
        if _completed(file, partial, download) == file.blob:
            return
        download.advance(-(file_size(partial) or 0))
        partial.unlink(missing_ok=True)
        if is_first:
            download.say(f"{download.where(file)} came with a wrong hash; fetching it once more")
    kind = "sha256" if file.sha256 else "git id"
    raise HubError(
        f"{download.where(file)} does not have the {kind} that the Hub lists for it, fetched twice",
        hint="the file is damaged where it is served, or on the way; try again later",
    )


def _completed(file: HubFile, partial: Path, download: Download) -> str:
    """Return the hash of a file once as many bytes as listed have come."""
    require_room(download.where(file), file.nbytes - (file_size(partial) or 0), partial)
    with _writing(partial):
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        handle = partial.open("r+b", buffering=0)
    with handle:
        if (file_size(partial) or 0) > file.nbytes:
            handle.truncate(0)
        digest, have = _hashed(handle, file, download)
        _Transfer(file, download, partial, handle, digest, have).run()
        with _writing(partial):
            os.fsync(handle.fileno())
    return digest.hexdigest()


@dataclass
class _Transfer:
    file: HubFile
    download: Download
    partial: Path
    handle: FileIO
    digest: Hash
    have: int
    barren: int = field(default=0, init=False)  # attempts in a row without a byte

    def run(self) -> None:
        attempts = 0
        while self.have < self.file.nbytes:
            before, attempts = self.have, attempts + 1
            dropped = self._attempt()
            if dropped is None:
                continue
            self.barren = 0 if self.have > before else self.barren + 1
            most = _MOST_BREAKS + self.file.nbytes // _PIECE_NBYTES
            if self.barren >= self.download.tries or attempts >= most:
                raise self._given_up(dropped, attempts)
            self._wait(dropped)

    def _attempt(self) -> DroppedError | None:
        """Read the response to one request; return how it ended if that was too early."""
        download, file = self.download, self.file
        try:
            with download.source.download(
                download.repo, download.commit, file, self.have, kind=download.kind
            ) as pieces:
                for piece in pieces:
                    self._write(piece)
                    download.check_stopped()
        except DroppedError as dropped:
            return dropped
        return None if self.have >= file.nbytes else DroppedError("it ended early")

    def _write(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            with _writing(self.partial):
                written = self.handle.write(view)
            self.digest.update(view[:written])
            view = view[written:]
        self.have += len(piece)
        self.download.advance(len(piece))
        self.download.receive(len(piece))

    def _wait(self, dropped: DroppedError) -> None:
        seconds = wait_seconds(dropped, max(1, self.barren), f"{self.file.blob} {self.have}")
        if seconds > LONGEST_WAIT_SECONDS:
            raise UnreachableError(
                f"the Hub asks to wait {seconds:.6g} s before it sends "
                f"{self.download.where(self.file)}",
                hint=f"when that time is over, {RESUME}",
            ) from dropped
        name = self.file.path.rpartition("/")[2]
        self.download.say(
            f"{name} broke off at {part_of(self.have, self.file.nbytes)} ({dropped.reason}); "
            f"going on in {seconds:.0f} s"
        )
        self.download.pause(seconds)
        self.download.check_stopped()

    def _given_up(self, dropped: DroppedError, attempts: int) -> UnreachableError:
        times = f"the last {self.barren} times without a byte" if self.barren else "too often"
        return UnreachableError(
            f"{self.download.where(self.file)} broke off at "
            f"{part_of(self.have, self.file.nbytes)} in {attempts} attempts, {times}: "
            f"{dropped.reason}",
            hint=f"when the Hub can be reached, {RESUME}",
        )


def _hashed(handle: FileIO, file: HubFile, download: Download) -> tuple[Hash, int]:
    digest, have = new_hash(file), 0
    buffer = bytearray(_PIECE_NBYTES)
    view = memoryview(buffer)
    while count := handle.readinto(buffer):
        digest.update(view[:count])
        have += count
        download.advance(count)
        download.check_stopped()
    return digest, have


@contextmanager
def _writing(partial: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            partial.unlink(missing_ok=True)  # or it would take its own room from the next attempt
        raise not_kept(partial, error) from error


def require_room(what: str, nbytes: int, path: Path) -> None:
    """Refuse to begin what the disk around `path` cannot take."""
    folder = next(place for place in path.absolute().parents if place.is_dir())
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise MachineError(
            f"{what} needs {size(nbytes)} more, and {size(free)} are free in `{folder}`",
            hint=f"free some space or name another disk with `HF_HUB_CACHE`, then {RESUME}",
        )
