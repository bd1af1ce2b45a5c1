"""Several files at once from the Hub, or from the cache where they are in it already.

A file that is in its snapshot and is what was listed costs a look at its stamp. One whose bytes
are in the cache under another commit costs a link. Only then is it requested, under the lock that
the Hub's own client takes for the same blob. A file that is there and wrong is replaced, with a
message; if another tool had written it, its replacement is never evicted either.

The first file that fails ends the others: what they have stays for the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock

from qaudit.checkpoints.stamps import HashKind, Stamp, known_hash, remember, remember_written
from qaudit.errors import Interrupted
from qaudit.hub.answers import HubFile, Kind
from qaudit.hub.cache import RepoCache, file_size, locked, not_kept
from qaudit.hub.failures import RESUME
from qaudit.hub.records import Ledger
from qaudit.hub.transfer import Download, Source, fetch, is_right, require_room
from qaudit.hub.weights import PlacedFile
from qaudit.types import Watch

_LOOK_UP_SECONDS = 0.2


@dataclass(frozen=True)
class Snapshot:
    """One commit of one repository, and its name for messages."""

    repo: str
    commit: str
    revision: str
    label: str
    kind: Kind = "model"

    @property
    def cache(self) -> RepoCache:
        return RepoCache.of(self.repo, self.kind)

    @property
    def claim(self) -> Path:
        """Return the file whose lock means that this commit is in use."""
        return self.cache.lock(f"{self.commit}.qaudit")

    def pointer(self, path: str) -> Path:
        return self.cache.pointer(self.commit, path)

    def nbytes_missing(self, placed: Sequence[PlacedFile]) -> int:
        """Return how many bytes are not in the cache, by sizes alone."""
        missing = {}
        for file, path in placed:
            if file_size(self.pointer(path)) == file.nbytes:
                continue
            if file_size(self.cache.blob(file.blob)) != file.nbytes:
                have = file_size(self.cache.partial(file.blob)) or 0
                missing[file.blob] = file.nbytes - (have if have <= file.nbytes else 0)
        return sum(missing.values())


class BlobProgress:
    """How much of several blobs is there; bytes that turn out to be wrong are subtracted."""

    _STEPS = 500  # a watch need not hear of every piece

    def __init__(self, watch: Watch, what: str, sizes: Mapping[str, int]) -> None:
        self._watch, self._what, self._sizes = watch, what, sizes
        self._total = sum(sizes.values())
        self._done = dict.fromkeys(sizes, 0)
        self._shown = -1
        self._lock = Lock()

    def advance(self, blob: str, nbytes: int) -> None:
        with self._lock:
            self._done[blob] = min(max(self._done[blob] + nbytes, 0), self._sizes[blob])
            received = sum(self._done.values())
            is_step = abs(received - self._shown) * self._STEPS >= self._total
            if received != self._shown and (is_step or received == self._total):
                self._shown = received
                self._watch.download(self._what, received, self._total)


@dataclass(eq=False)
class Downloader:
    """Fetches files, several at a time, and counts their bytes."""

    source: Source
    ledger: Ledger
    watch: Watch
    workers: int
    tries: int
    pause: Callable[[float], object] | None  # None: wait, and wake up when stopped
    stopped: Event = field(default_factory=Event)
    nbytes_fetched: int = 0  # over the network, useful or not
    nbytes_verified: int = 0  # of files that have the right hash, fetched or not
    _counting: Lock = field(default_factory=Lock)

    def download(
        self, snapshot: Snapshot, placed: Sequence[PlacedFile], *, show: bool = True
    ) -> None:
        """Fetch files and link them into their snapshot; each blob is fetched once."""
        missing = snapshot.nbytes_missing(placed)
        require_room(snapshot.label, missing, snapshot.cache.folder)
        blobs = {file.blob: file for file, _ in placed}
        sizes = {blob: file.nbytes for blob, file in blobs.items()}
        progress = BlobProgress(self.watch, snapshot.label, sizes) if show else None
        ended = Event()
        futures: list[Future[None]] = []
        with ThreadPoolExecutor(self.workers, thread_name_prefix="fetch") as pool:
            try:
                for file in blobs.values():
                    paths = [path for other, path in placed if other.blob == file.blob]
                    download = self._download(snapshot, file, ended, progress)
                    futures.append(pool.submit(self._provide, snapshot, file, paths, download))
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                ended.set()
                pool.shutdown(wait=True, cancel_futures=True)
        _raise_first(futures)

    def _provide(
        self, snapshot: Snapshot, file: HubFile, paths: Sequence[str], download: Download
    ) -> None:
        absent = [p for p in paths if not self._is_right(snapshot.pointer(p), file, download)]
        if absent:
            cache = snapshot.cache
            with locked(cache.lock(file.blob), _on_wait(file, download)):
                if not self._is_right(cache.blob(file.blob), file, download):
                    self._fetch(cache, file, download)
                for path in absent:
                    self._link(snapshot, file, path)
        download.advance(file.nbytes)  # whatever was counted before, all of it is there now

    def _is_right(self, path: Path, file: HubFile, download: Download) -> bool:
        """Return whether a file is the one listed; hash it unless its hash is known."""
        if file_size(path) != file.nbytes:
            return False
        real = path.resolve()
        if known_hash(real, _hash_kind(file)) == file.blob:
            return True
        stamp = Stamp.of(real)
        if not is_right(real, file, download):
            return False
        self._count(verified=file.nbytes)
        remember(real, stamp, file.blob, _hash_kind(file))
        return True

    def _fetch(self, cache: RepoCache, file: HubFile, download: Download) -> None:
        blob, partial = cache.blob(file.blob), cache.partial(file.blob)
        ours = True
        if file_size(blob) is not None:
            ours = self.ledger.has(blob)
            whose = "" if ours else ", which was there before,"
            download.say(f"`{blob}`{whose} is not what its name says; fetching it again")
        fetch(file, partial, download)
        self._count(verified=file.nbytes)
        try:
            self.ledger.add(blob, Stamp.of(partial), file.identity, downloaded=ours)
            partial.replace(blob)
            remember_written(blob, file.blob, _hash_kind(file))
        except OSError as error:
            # Locks may not hold between hosts: another one moved the same bytes there.
            if not self._is_right(blob, file, download):
                raise not_kept(blob, error) from error

    def _link(self, snapshot: Snapshot, file: HubFile, path: str) -> None:
        pointer = snapshot.pointer(path)
        exists = file_size(pointer) is not None
        if exists and pointer.samefile(snapshot.cache.blob(file.blob)):
            return
        if exists:
            self.watch.note(f"`{pointer}` is not what the Hub lists; replacing it")

        def note(passing: Path, to: Path) -> None:
            self.ledger.add(to, Stamp.of_link(passing), file.blob, downloaded=not exists)

        snapshot.cache.link(snapshot.commit, path, file.blob, note)

    def _download(
        self, snapshot: Snapshot, file: HubFile, ended: Event, progress: BlobProgress | None
    ) -> Download:
        def check_stopped() -> None:
            if ended.is_set() or self.stopped.is_set():
                raise Interrupted("the download was stopped", hint=RESUME)

        def pause(seconds: float) -> None:
            if self.pause is not None:
                self.pause(seconds)
                return
            while seconds > 0:
                check_stopped()
                ended.wait(min(seconds, _LOOK_UP_SECONDS))
                seconds -= _LOOK_UP_SECONDS

        return Download(
            source=self.source,
            repo=snapshot.repo,
            commit=snapshot.commit,
            kind=snapshot.kind,
            revision=snapshot.revision,
            tries=self.tries,
            advance=lambda nbytes: progress.advance(file.blob, nbytes) if progress else None,
            receive=lambda nbytes: self._count(fetched=nbytes),
            say=self.watch.note,
            pause=pause,
            check_stopped=check_stopped,
        )

    def _count(self, *, fetched: int = 0, verified: int = 0) -> None:
        with self._counting:
            self.nbytes_fetched += fetched
            self.nbytes_verified += verified


def _hash_kind(file: HubFile) -> HashKind:
    return "sha256" if file.sha256 else "git"


def _on_wait(file: HubFile, download: Download) -> Callable[[], None]:
    """Return a function to call repeatedly while another process fetches a file."""
    is_first = True

    def on_wait() -> None:
        nonlocal is_first
        download.check_stopped()
        if is_first:
            where = download.where(file)
            download.say(f"{where} is being fetched by another process; waiting for it")
        is_first = False

    return on_wait


def _raise_first(futures: Sequence[Future[None]]) -> None:
    """Raise the error that ended the work, before those of the others that it stopped."""
    errors = [f.exception() for f in futures if not f.cancelled()]
    causes = [e for e in errors if e is not None and not isinstance(e, Interrupted)]
    for error in (*causes, *errors):
        if error is not None:
            raise error
