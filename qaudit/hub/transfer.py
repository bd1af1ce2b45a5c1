"""One file over a bad line: gone on with until it is whole, and believed once its hash is right.

Bytes are written as they come under the blob's passing name, at their own place: a process that
is killed leaves what it had, and the next one hashes that and asks for the rest. Two processes
on a file system without working locks write the same bytes to the same places. The hash runs
along, so a file is read back only where an earlier process had begun it.

A transfer that brings bytes may break off as often as it likes, within reason; one that brings
nothing is tried a few times, with longer and longer pauses or those the server asks for. A file
that is complete and wrong is thrown away and fetched once more from its beginning: the damage
is as likely on this disk as on the server's, and telling which is not worth a third time.
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
from qaudit.hub.cache import not_kept, not_read
from qaudit.hub.entries import RESUME, DroppedError, HubFile, Kind
from qaudit.hub.patience import LONGEST_WAIT_SECONDS, wait_seconds

_PIECE_NBYTES = 1 << 20
_MOST_BREAKS = 1000  # and one more for each MiB: a proxy may cut every transfer short


class Source(Protocol):
    """What is asked of the Hub's client here."""

    def download(
        self, repo: str, commit: str, file: HubFile, start: int, *, kind: Kind = "model"
    ) -> AbstractContextManager[Iterator[bytes]]:
        """Stream a file from a byte on, in one attempt."""


@dataclass(frozen=True)
class Errand:
    """Where files come from, and who hears of it."""

    source: Source
    repo: str
    commit: str
    kind: Kind = "model"
    revision: str | None = None
    tries: int = 6
    came: Callable[[int], object] = lambda nbytes: None  # bytes that are there; negative: lost
    received: Callable[[int], object] = lambda nbytes: None  # bytes over the network alone
    say: Callable[[str], object] = lambda text: None
    pause: Callable[[float], object] = lambda seconds: None
    go_on: Callable[[], object] = lambda: None  # raises where the work shall end

    def where(self, file: HubFile) -> str:
        """Name a file, its repository and its revision for a message."""
        return f"`{file.path}` of `{self.repo}` at `{self.revision or self.commit}`"


class Hash(Protocol):
    """A hash that is not finished."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take more bytes."""

    def hexdigest(self) -> str:
        """Return the hash of what was taken."""


def begun_hash(file: HubFile) -> Hash:
    """Begin the hash that names a file's blob: sha256, or git's own of the bytes and length."""
    if file.sha256 is not None:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.nbytes, usedforsecurity=False)


def is_right(path: Path, file: HubFile, errand: Errand) -> bool:
    """Read a whole file and say whether it is what was listed."""
    try:
        with path.open("rb", buffering=0) as handle:
            digest, _ = _hashed(handle, file, errand)
    except OSError as error:
        raise not_read(path, error) from error
    if digest.hexdigest() == file.blob:
        return True
    errand.came(-path.stat().st_size)
    return False


def fetch(file: HubFile, partial: Path, errand: Errand) -> None:
    """Bring a file to its passing name, whole, checked and on the disk."""
    for once_more in (True, False):
        if _completed(file, partial, errand) == file.blob:
            return
        errand.came(-_size(partial))
        partial.unlink(missing_ok=True)
        if once_more:
            errand.say(f"{errand.where(file)} came with a wrong hash; fetching it once more")
    kind = "sha256" if file.sha256 else "git id"
    raise HubError(
        f"{errand.where(file)} does not have the {kind} that the Hub lists for it, fetched twice",
        hint="the file is damaged where it is served, or on the way; try again later",
    )


def _completed(file: HubFile, partial: Path, errand: Errand) -> str:
    """Return the hash of a file once as many bytes as listed have come."""
    must_have_room(errand.where(file), file.nbytes - _size(partial), partial)
    with _writing(partial):
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        handle = partial.open("r+b", buffering=0)
    with handle:
        if _size(partial) > file.nbytes:
            handle.truncate(0)
        digest, have = _hashed(handle, file, errand)
        _Transfer(file, errand, partial, handle, digest, have).run()
        with _writing(partial):
            os.fsync(handle.fileno())
    return digest.hexdigest()


@dataclass
class _Transfer:
    file: HubFile
    errand: Errand
    partial: Path
    handle: FileIO
    digest: Hash
    have: int
    barren: int = field(default=0, init=False)  # attempts in a row without a byte

    def run(self) -> None:
        """Ask again and again until all bytes have come."""
        attempts = 0
        while self.have < self.file.nbytes:
            before, attempts = self.have, attempts + 1
            dropped = self._attempt()
            if dropped is None:
                continue
            self.barren = 0 if self.have > before else self.barren + 1
            most = _MOST_BREAKS + self.file.nbytes // _PIECE_NBYTES
            if self.barren >= self.errand.tries or attempts >= most:
                raise self._given_up(dropped, attempts)
            self._rest(dropped)

    def _attempt(self) -> DroppedError | None:
        """Take what one request brings; say how it ended if that was too early."""
        errand, file = self.errand, self.file
        try:
            with errand.source.download(
                errand.repo, errand.commit, file, self.have, kind=errand.kind
            ) as pieces:
                for piece in pieces:
                    self._take(piece)
                    errand.go_on()
        except DroppedError as dropped:
            return dropped
        return None if self.have >= file.nbytes else DroppedError("it ended early")

    def _take(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            with _writing(self.partial):
                written = self.handle.write(view)
            self.digest.update(view[:written])
            view = view[written:]
        self.have += len(piece)
        self.errand.came(len(piece))
        self.errand.received(len(piece))

    def _rest(self, dropped: DroppedError) -> None:
        seconds = wait_seconds(dropped, max(1, self.barren), f"{self.file.blob} {self.have}")
        if seconds > LONGEST_WAIT_SECONDS:
            raise UnreachableError(
                f"the Hub asks to wait {seconds:.6g} s before it sends {self._where}",
                hint=f"when that time is over, {RESUME}",
            ) from dropped
        name = self.file.path.rpartition("/")[2]
        self.errand.say(
            f"{name} broke off at {part_of(self.have, self.file.nbytes)} ({dropped.reason}); "
            f"going on in {seconds:.0f} s"
        )
        self.errand.pause(seconds)
        self.errand.go_on()

    def _given_up(self, dropped: DroppedError, attempts: int) -> UnreachableError:
        times = f"the last {self.barren} times without a byte" if self.barren else "too often"
        return UnreachableError(
            f"{self._where} broke off at {part_of(self.have, self.file.nbytes)} in "
            f"{attempts} attempts, {times}: {dropped.reason}",
            hint=f"when the Hub can be reached, {RESUME}",
        )

    @property
    def _where(self) -> str:
        return self.errand.where(self.file)


def _hashed(handle: FileIO, file: HubFile, errand: Errand) -> tuple[Hash, int]:
    """Hash what is there already, and stand behind it."""
    digest, have = begun_hash(file), 0
    buffer = bytearray(_PIECE_NBYTES)
    view = memoryview(buffer)
    while count := handle.readinto(buffer):
        digest.update(view[:count])
        have += count
        errand.came(count)
        errand.go_on()
    return digest, have


@contextmanager
def _writing(partial: Path) -> Generator[None]:
    """Say what the disk did not take; what fills it is removed, or it would block its own room."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            partial.unlink(missing_ok=True)
        raise not_kept(partial, error) from error


def must_have_room(what: str, nbytes: int, path: Path) -> None:
    """Refuse to begin what the disk around `path` cannot take."""
    folder = next(place for place in path.absolute().parents if place.is_dir())
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise MachineError(
            f"{what} needs {size(nbytes)} more, and {size(free)} are free in `{folder}`",
            hint=f"free some space or name another disk with `HF_HUB_CACHE`, then {RESUME}",
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
