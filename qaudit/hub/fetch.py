"""Checkpoints from the Hub onto this machine: resumed, verified, shared, and evicted again.

Files are stored where every Hugging Face tool keeps them (`cache`), so that other tools use what
a scan fetched. A file that is in its snapshot and is what was listed costs a look at its stamp; one
whose bytes are in the cache under another commit costs a link. Only then is it requested, under the
lock that the Hub's own client takes for the same blob. A file that is there and wrong is replaced,
with a message; if another tool had written it, its replacement is never evicted either. The first
file that fails ends the others: what they have stays for the next run.

Bytes are written as they come under the blob's passing name, at their own place: a process that
is killed leaves what it had, and the next one hashes that and requests the rest. Two processes on
a file system without working locks write the same bytes to the same places. The hash runs along,
so a file is read back only where an earlier process had begun it.

A transfer that makes progress may break off as often as it likes, within reason; one that does
not is tried a few times, with longer and longer pauses or those that the server requests. A file
that is complete and wrong is removed and fetched once more from its beginning: the damage is as
likely on this disk as on the server's, and finding out which is not worth a third time.

The small files stay when weights are evicted. A checkpoint without a commit is a local folder:
there is nothing to fetch and nothing to evict.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING

from qaudit.checkpoints.folder import holds_adapter
from qaudit.checkpoints.safetensors import ADAPTER
from qaudit.checkpoints.stamps import (
    HashKind,
    Stamp,
    folder_of,
    is_gguf,
    known_hash,
    own_folder,
    remember,
    remember_written,
    snapshot,
    text_path,
    weights_of,
)
from qaudit.errors import HubError, Interrupted, MachineError, UnreachableError
from qaudit.hub.answers import RESUME, DroppedError, HubFile, Kind, wait_seconds
from qaudit.hub.api import Client
from qaudit.hub.cache import Claims, Ledger, Snapshot, evict, file_size, locked, not_kept, not_read
from qaudit.hub.listing import Listing
from qaudit.hub.series import PlacedFile, index_file, settings_files, weights_on_hub
from qaudit.support.sizes import part_of, size
from qaudit.types import SILENT, Checkpoint, TextFile, Watch

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

_PIECE_NBYTES = 1 << 20
_MOST_BREAKS = 1000  # and one more for each MiB: a proxy may cut every transfer short
_LOOK_UP_SECONDS = 0.2


class BlobProgress:
    """How much of several blobs is there; bytes that turn out to be wrong are subtracted."""

    def __init__(self, watch: Watch, what: str, blobs: Mapping[str, HubFile]) -> None:
        self._watch, self._what, self._blobs = watch, what, blobs
        self._total = sum(file.nbytes for file in blobs.values())
        self._done = dict.fromkeys(blobs, 0)
        self._lock = Lock()

    def advance(self, blob: str, nbytes: int) -> None:
        with self._lock:
            self._done[blob] = min(max(self._done[blob] + nbytes, 0), self._blobs[blob].nbytes)
            self._watch.download(self._what, sum(self._done.values()), self._total)


class Fetcher:
    """Fetches and evicts the files of checkpoints; may be used by several threads."""

    def __init__(
        self,
        client: Client,
        listing: Listing,
        *,
        watch: Watch = SILENT,
        workers: int = 4,
        pause: Callable[[float], object] | None = None,
        tries: int = 6,
    ) -> None:
        """Without a `pause` of its own, waiting ends when the client breaks off."""
        self.client, self.listing, self.watch = client, listing, watch
        self.workers, self.pause, self.tries = workers, pause, tries
        self.ledger = Ledger()
        self.nbytes_fetched = 0  # over the network, useful or not
        self.nbytes_verified = 0  # of files that have the right hash, fetched now or before
        self._claims, self._counting = Claims(), Lock()

    def count(self, *, fetched: int = 0, verified: int = 0) -> None:
        with self._counting:
            self.nbytes_fetched += fetched
            self.nbytes_verified += verified

    def settings(self, checkpoint: Checkpoint, *, code: bool = False) -> Path:
        """Fetch config, tokenizer and index, and Python files only if `code`; return the folder."""
        folder = own_folder(checkpoint)
        if checkpoint.commit is not None and weights_of(checkpoint, folder) == folder:
            commit = _snapshot(checkpoint)
            files = self.listing.files(commit.repo, commit.commit)
            placed = settings_files(files, checkpoint.ref.subfolder, code=code)
            needed = ADAPTER if holds_adapter(checkpoint) else "config.json"
            if not any(file.path.rpartition("/")[2] == needed for file, _ in placed):
                raise HubError(
                    f"there is no `config.json` in `{checkpoint.ref}`",
                    hint="audit a revision that has one",
                )
            self._fetch(commit, placed, show=False)
        return folder

    def weights(self, checkpoint: Checkpoint) -> Path:
        if checkpoint.commit is not None:
            commit = _snapshot(checkpoint)
            self._claims.take(commit.claim)
            names = [file.name for file in checkpoint.files]
            single = ["model.safetensors"], ["pytorch_model.bin"]  # which need no index
            if names and names not in single and not is_gguf("".join(names)):
                files = self.listing.files(commit.repo, commit.commit)
                index = index_file(files, checkpoint.ref.subfolder, names)
                self._fetch(commit, index, show=False)
            self._fetch(commit, _weights(checkpoint))
        return folder_of(checkpoint)

    def text(self, text: TextFile) -> Path:
        file = HubFile.identified(text.path, text.nbytes, text.sha256)
        self.files(text.repo, text.commit, text.source, [file], kind="dataset")
        return text_path(text)

    def files(
        self,
        repo: str,
        commit: str,
        what: str,
        files: Sequence[HubFile],
        *,
        kind: Kind = "model",
        show: bool = True,
    ) -> Path:
        placed = [(file, file.path) for file in files]
        self._fetch(Snapshot(repo, kind, commit, commit, what), placed, show=show)
        return snapshot(repo, commit, kind)

    def nbytes_missing(self, checkpoint: Checkpoint) -> int:
        if checkpoint.commit is None:
            return 0
        return _snapshot(checkpoint).nbytes_missing(_weights(checkpoint))

    def evict(self, checkpoint: Checkpoint, *, keep: Iterable[Checkpoint] = ()) -> int:
        """Remove weights that this tool downloaded and no checkpoint needs; return bytes freed."""
        if checkpoint.commit is None:
            return 0
        commit = _snapshot(checkpoint)
        kept = [c for c in keep if c.commit is not None and c.ref.location == commit.repo]
        with self._claims.alone(commit.claim) as alone:
            if not alone:
                self.watch.note(f"{commit.label} is used by another scan, so it stays on the disk")
                return 0
            freed = evict(
                commit, self.ledger, _links(checkpoint), [link for c in kept for link in _links(c)]
            )
        if any(c.commit == commit.commit for c in kept):
            self._claims.take(commit.claim)
        return freed

    def _fetch(
        self, snapshot: Snapshot, placed: Sequence[PlacedFile], *, show: bool = True
    ) -> None:
        """Fetch files and link them into their snapshot; each blob is fetched once."""
        require_room(snapshot.label, snapshot.nbytes_missing(placed), snapshot.folder)
        blobs = {file.blob: file for file, _ in placed}
        progress = BlobProgress(self.watch if show else SILENT, snapshot.label, blobs)
        ended = Event()
        futures: list[Future[None]] = []
        with ThreadPoolExecutor(self.workers, thread_name_prefix="fetch") as pool:
            try:
                for file in blobs.values():
                    paths = [path for other, path in placed if other.blob == file.blob]
                    transfer = Transfer(self, snapshot, file, progress, ended)
                    futures.append(pool.submit(transfer.provide, paths))
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                ended.set()
                pool.shutdown(wait=True, cancel_futures=True)
        errors = [future.exception() for future in futures if not future.cancelled()]
        # What ended the work comes before what it stopped.
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, Interrupted)):
            raise error


@dataclass(eq=False)
class Transfer:
    """One file on its way into the cache."""

    fetcher: Fetcher
    snapshot: Snapshot
    file: HubFile
    progress: BlobProgress
    ended: Event = field(default_factory=Event)  # set when another file failed

    @property
    def where(self) -> str:
        return f"`{self.file.path}` of `{self.snapshot.repo}` at `{self.snapshot.revision}`"

    @property
    def _hash_kind(self) -> HashKind:
        return "sha256" if self.file.sha256 else "git"

    def provide(self, paths: Sequence[str]) -> None:
        """Have the file at some paths of the snapshot."""
        snapshot, blob = self.snapshot, self.file.blob
        absent = [path for path in paths if not self._is_right(snapshot.pointer(path))]
        if absent:

            def on_wait(waits: int) -> None:
                self._check_stopped()
                if waits == 1:
                    self._say(f"{self.where} is being fetched by another process; waiting for it")

            with locked(snapshot.lock(blob), on_wait):
                if not self._is_right(snapshot.blob(blob)):
                    self._fetch_blob()
                for path in absent:
                    pointer = snapshot.pointer(path)
                    exists = file_size(pointer) is not None
                    if exists and pointer.samefile(snapshot.blob(blob)):
                        continue
                    if exists:
                        self._say(f"`{pointer}` is not what the Hub lists; replacing it")
                    snapshot.link(path, blob, self.fetcher.ledger, downloaded=not exists)
        self._advance(self.file.nbytes)  # whatever was counted before, all of it is there now

    def _is_right(self, path: Path) -> bool:
        """Return whether a file is the one listed; hash it unless its hash is known."""
        if file_size(path) != self.file.nbytes:
            return False
        real = path.resolve()
        if known_hash(real, self._hash_kind) == self.file.blob:
            return True
        stamp = Stamp.of(real)
        try:
            with real.open("rb", buffering=0) as handle:
                digest, nbytes = self._hashed(handle)
        except OSError as error:
            raise not_read(real, error) from error
        if digest.hexdigest() != self.file.blob:
            self._advance(-nbytes)
            return False
        self.fetcher.count(verified=nbytes)
        remember(real, stamp, self.file.blob, self._hash_kind)
        return True

    def _fetch_blob(self) -> None:
        file, ledger = self.file, self.fetcher.ledger
        blob, partial = self.snapshot.blob(file.blob), self.snapshot.partial(file.blob)
        ours = True
        if file_size(blob) is not None:
            ours = ledger.has(blob)
            whose = "" if ours else ", which was there before,"
            self._say(f"`{blob}`{whose} is not what its name says; fetching it again")
        self.fetch(partial)
        self.fetcher.count(verified=file.nbytes)
        try:
            ledger.add(blob, Stamp.of(partial), file.identity, downloaded=ours)
            partial.replace(blob)
            remember_written(blob, file.blob, self._hash_kind)
        except OSError as error:
            # Locks may not hold between hosts: another one moved the same bytes there.
            if not self._is_right(blob):
                raise not_kept(blob, error) from error

    def fetch(self, partial: Path) -> None:
        """Fetch the file to its passing name, whole, checked and on the disk."""
        for is_first in (True, False):
            require_room(self.where, self.file.nbytes - (file_size(partial) or 0), partial)
            with _writing(partial):
                partial.parent.mkdir(parents=True, exist_ok=True)
                partial.touch()
                handle = partial.open("r+b", buffering=0)
            with handle:
                if (file_size(partial) or 0) > self.file.nbytes:
                    handle.truncate(0)
                digest, have = self._hashed(handle)
                self._receive(partial, handle, digest, have)
                with _writing(partial):
                    os.fsync(handle.fileno())
            if digest.hexdigest() == self.file.blob:
                return
            self._advance(-(file_size(partial) or 0))
            partial.unlink(missing_ok=True)
            if is_first:
                self._say(f"{self.where} came with a wrong hash; fetching it once more")
        kind = "sha256" if self.file.sha256 else "git id"
        raise HubError(
            f"{self.where} does not have the {kind} that the Hub lists for it, fetched twice",
            hint="the file is damaged where it is served, or on the way; try again later",
        )

    def _hashed(self, handle: FileIO) -> tuple[Hash, int]:
        """Begin the hash that names the blob with the bytes that are there; return it and those."""
        digest = hashlib.sha256()
        if self.file.sha256 is None:  # git's own, of the length and the bytes
            digest = hashlib.sha1(b"blob %d\0" % self.file.nbytes, usedforsecurity=False)
        have = 0
        buffer = bytearray(_PIECE_NBYTES)
        view = memoryview(buffer)
        while count := handle.readinto(buffer):
            digest.update(view[:count])
            have += count
            self._advance(count)
            self._check_stopped()
        return digest, have

    def _receive(self, partial: Path, handle: FileIO, digest: Hash, have: int) -> None:
        """Append what is missing, in as many attempts as that takes."""
        file, snapshot = self.file, self.snapshot
        attempts = barren = 0  # attempts in a row without a byte
        while have < file.nbytes:
            before, attempts = have, attempts + 1
            dropped = DroppedError("it ended early")
            try:
                with self.fetcher.client.download(
                    snapshot.repo, snapshot.commit, file, have, kind=snapshot.kind
                ) as pieces:
                    for piece in pieces:
                        view = memoryview(piece)
                        while view:
                            with _writing(partial):
                                written = handle.write(view)
                            digest.update(view[:written])
                            view = view[written:]
                        have += len(piece)
                        self._advance(len(piece))
                        self.fetcher.count(fetched=len(piece))
                        self._check_stopped()
            except DroppedError as error:
                dropped = error
            if have >= file.nbytes:
                return
            barren = 0 if have > before else barren + 1
            most = _MOST_BREAKS + file.nbytes // _PIECE_NBYTES
            if barren >= self.fetcher.tries or attempts >= most:
                times = f"the last {barren} times without a byte" if barren else "too often"
                raise UnreachableError(
                    f"{self.where} broke off at {part_of(have, file.nbytes)} in {attempts} "
                    f"attempts, {times}: {dropped.reason}",
                    hint=f"when the Hub can be reached, {RESUME}",
                )
            self._pause(dropped, have, barren)

    def _pause(self, dropped: DroppedError, have: int, barren: int) -> None:
        call, before = f"{self.file.blob} {have}", f"sends {self.where}"
        seconds = wait_seconds(dropped, max(1, barren), call, before)
        name = self.file.path.rpartition("/")[2]
        self._say(
            f"{name} broke off at {part_of(have, self.file.nbytes)} ({dropped.reason}); "
            f"going on in {seconds:.0f} s"
        )
        if self.fetcher.pause is not None:
            self.fetcher.pause(seconds)
            seconds = 0
        while seconds > 0:
            self._check_stopped()
            self.ended.wait(min(seconds, _LOOK_UP_SECONDS))
            seconds -= _LOOK_UP_SECONDS
        self._check_stopped()

    def _advance(self, nbytes: int) -> None:
        """Count bytes of the file; negative ones turned out to be wrong."""
        self.progress.advance(self.file.blob, nbytes)

    def _say(self, text: str) -> None:
        self.fetcher.watch.note(text)

    def _check_stopped(self) -> None:
        if self.ended.is_set() or self.fetcher.client.stopped.is_set():
            raise Interrupted("the download was stopped", hint=RESUME)


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


def _snapshot(checkpoint: Checkpoint) -> Snapshot:
    commit = str(checkpoint.commit)
    ref = checkpoint.ref
    return Snapshot(ref.location, "model", commit, ref.revision or commit, checkpoint.label)


def _weights(checkpoint: Checkpoint) -> list[PlacedFile]:
    return [(file, file.path) for file in weights_on_hub(checkpoint)]


def _links(checkpoint: Checkpoint) -> list[tuple[Path, str]]:
    """Return where the weights of a checkpoint are linked, and the blobs."""
    commit = _snapshot(checkpoint)
    return [(commit.pointer(path), file.blob) for file, path in _weights(checkpoint)]
