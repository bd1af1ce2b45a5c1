"""Several files at once from the Hub, or from wherever in the cache they already are.

A file that is in its snapshot and is what was listed costs a look at its stamp. One whose
bytes are in the cache under another commit costs a link. Only then is the Hub asked, under the
lock that its own client takes for the same blob. A file that is there and wrong is replaced,
with a message; if another tool had written it, its replacement is never evicted either.

The first file that cannot be had ends the others: what they have stays for the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from qaudit.checkpoints.stamps import HashKind, Stamp, known_hash, remember, remember_written
from qaudit.errors import Interrupted
from qaudit.hub.cache import RepoCache, locked, not_kept, not_read
from qaudit.hub.entries import RESUME, HubFile, Kind
from qaudit.hub.ledger import Ledger
from qaudit.hub.settings import Placed
from qaudit.hub.transfer import Errand, Source, fetch, is_right, must_have_room
from qaudit.hub.watch import Progress, Receipt, Watch

_LOOK_UP_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """Files of one commit of one repository, and what a person calls them."""

    repo: str
    commit: str
    revision: str
    what: str
    kind: Kind = "model"

    @property
    def cache(self) -> RepoCache:
        """Return the repository's folder in the shared cache."""
        return RepoCache.of(self.repo, self.kind)

    @property
    def claim(self) -> Path:
        """Return the file whose lock says that this commit is in use."""
        return self.cache.lock(f"{self.commit}.qaudit")

    def pointer(self, path: str) -> Path:
        """Return where a file of the commit is found."""
        return self.cache.pointer(self.commit, path)

    def nbytes_missing(self, placed: Sequence[Placed]) -> int:
        """Return how many bytes are not in the cache, by sizes alone; what had come counts."""
        missing = {}
        for file, path in placed:
            if _size(self.pointer(path)) == file.nbytes:
                continue
            if _size(self.cache.blob(file.blob)) != file.nbytes:
                had = _size(self.cache.partial(file.blob)) or 0
                missing[file.blob] = file.nbytes - (had if had <= file.nbytes else 0)
        return sum(missing.values())


@dataclass(frozen=True)
class Bringer:
    """Who fetches, how patiently, and who hears of it."""

    source: Source
    ledger: Ledger
    receipt: Receipt
    watch: Watch
    workers: int
    tries: int
    pause: Callable[[float], object] | None  # None: wait, and wake up when stopped
    stopped: Event

    def bring(self, job: Job, placed: Sequence[Placed], *, seen: bool = True) -> None:
        """Bring files and link them into their snapshot; each blob comes once."""
        must_have_room(job.what, job.nbytes_missing(placed), job.cache.folder)
        blobs = {file.blob: file for file, _ in placed}
        progress = Progress(self.watch, job.what, {b: file.nbytes for b, file in blobs.items()})
        ended = Event()
        futures: list[Future[None]] = []
        with ThreadPoolExecutor(self.workers, thread_name_prefix="fetch") as pool:
            try:
                for file in blobs.values():
                    at = [path for other, path in placed if other.blob == file.blob]
                    errand = self._errand(job, file, ended, progress if seen else None)
                    futures.append(pool.submit(self._bring_one, job, file, at, errand))
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                ended.set()
                pool.shutdown(wait=True, cancel_futures=True)
        _raise_first(futures)

    def _bring_one(self, job: Job, file: HubFile, paths: Sequence[str], errand: Errand) -> None:
        absent = [p for p in paths if not self._stands(job.pointer(p), file, errand)]
        if absent:
            blob = job.cache.blob(file.blob)
            with locked(job.cache.lock(file.blob), _waiting(file, errand)):
                if not self._stands(blob, file, errand):
                    self._fetch(job, file, errand)
                for path in absent:
                    self._link(job, file, path)
        errand.came(file.nbytes)  # whatever had been counted, now it is all there

    def _stands(self, path: Path, file: HubFile, errand: Errand) -> bool:
        """Say whether a file is there and is what was listed; hash it unless that is known."""
        if _size(path) != file.nbytes:
            return False
        real = path.resolve()
        if known_hash(real, _kind(file)) == file.blob:
            return True
        stamp = Stamp.of(real)
        if not is_right(real, file, errand):
            return False
        self.receipt.verified(file.nbytes)
        remember(real, stamp, file.blob, _kind(file))
        return True

    def _fetch(self, job: Job, file: HubFile, errand: Errand) -> None:
        blob, partial = job.cache.blob(file.blob), job.cache.partial(file.blob)
        ours = True
        if _size(blob) is not None:
            ours = self.ledger.is_brought(blob)
            whose = "" if ours else ", which was there before,"
            errand.say(f"`{blob}`{whose} is not what its name says; fetching it again")
        fetch(file, partial, errand)
        self.receipt.verified(file.nbytes)
        self.ledger.enter(blob, Stamp.of(partial), file.identity, brought=ours)
        try:
            partial.replace(blob)
            remember_written(blob, file.blob, _kind(file))
        except OSError as error:
            raise not_kept(blob, error) from error

    def _link(self, job: Job, file: HubFile, path: str) -> None:
        """Point a file of the snapshot at its blob; a wrong one is replaced."""
        pointer, blob = job.pointer(path), job.cache.blob(file.blob)
        there = _size(pointer) is not None
        if there and pointer.samefile(blob):
            return
        if there:
            self.watch.said(f"`{pointer}` is not what the Hub lists; replacing it")
        job.cache.link(
            job.commit,
            path,
            file.blob,
            lambda passing, to: self.ledger.enter(
                to, Stamp.of_link(passing), file.blob, brought=not there
            ),
        )

    def _errand(self, job: Job, file: HubFile, ended: Event, progress: Progress | None) -> Errand:
        def go_on() -> None:
            if ended.is_set() or self.stopped.is_set():
                raise Interrupted("the download was stopped", hint=RESUME)

        def pause(seconds: float) -> None:
            if self.pause is not None:
                self.pause(seconds)
                return
            while seconds > 0:
                go_on()
                ended.wait(min(seconds, _LOOK_UP_SECONDS))
                seconds -= _LOOK_UP_SECONDS

        return Errand(
            source=self.source,
            repo=job.repo,
            commit=job.commit,
            kind=job.kind,
            revision=job.revision,
            tries=self.tries,
            came=lambda nbytes: progress.came(file.blob, nbytes) if progress else None,
            received=self.receipt.fetched,
            say=self.watch.said,
            pause=pause,
            go_on=go_on,
        )


def _kind(file: HubFile) -> HashKind:
    return "sha256" if file.sha256 else "git"


def _waiting(file: HubFile, errand: Errand) -> Callable[[], None]:
    """Return what is done again and again while another process brings a file."""
    said = False

    def waits() -> None:
        nonlocal said
        errand.go_on()
        if not said:
            errand.say(f"{errand.where(file)} is being fetched by another process; waiting for it")
        said = True

    return waits


def _raise_first(futures: Sequence[Future[None]]) -> None:
    """Raise what ended the work; that the others were stopped for it says nothing."""
    errors = [f.exception() for f in futures if not f.cancelled()]
    real = [e for e in errors if e is not None and not isinstance(e, Interrupted)]
    for error in (*real, *errors):
        if error is not None:
            raise error


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise not_read(path, error) from error
