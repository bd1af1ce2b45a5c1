"""Checkpoints from the Hub onto this machine: resumed, verified, shared, and evicted again.

Files are stored where every Hugging Face tool keeps them (`cache`), so that other tools use what
a scan fetched, and what was there already is never fetched twice. Nothing is handed out
unhashed: bytes are hashed as they come (`transfer`), and files that were there are hashed once
and remembered by their stamp, because hashing 30 GB takes a minute.

The small files stay when weights are evicted. A checkpoint without a commit is a local folder:
there is nothing to fetch and nothing to evict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from qaudit.checkpoints.places import folder_of, snapshot, text_path
from qaudit.errors import HubError
from qaudit.hub.bring import Bringer, Job
from qaudit.hub.claims import Claims
from qaudit.hub.entries import HubFile
from qaudit.hub.evict import evict
from qaudit.hub.ledger import Ledger
from qaudit.hub.settings import Placed, index_of, settings_of
from qaudit.hub.transfer import Source
from qaudit.hub.watch import SILENT, Receipt, Watch
from qaudit.types import Checkpoint, TextFile

if TYPE_CHECKING:
    from qaudit.hub.listing import Listing

__all__ = ["SILENT", "Fetcher", "Watch"]


class Fetcher:
    """What brings files, and takes them away; may be used by several threads."""

    def __init__(
        self,
        client: Source,
        listing: Listing,
        *,
        watch: Watch = SILENT,
        workers: int = 4,
        pause: Callable[[float], object] | None = None,
        tries: int = 6,
    ) -> None:
        """Bring nothing yet; without a `pause` of its own, waiting ends when `stop` is called."""
        self.client, self.listing, self.watch = client, listing, watch
        self._ledger, self._receipt = Ledger(), Receipt()
        self._claims, self._stopped = Claims(), Event()
        self._bringer = Bringer(
            source=client,
            ledger=self._ledger,
            receipt=self._receipt,
            watch=watch,
            workers=workers,
            tries=tries,
            pause=pause,
            stopped=self._stopped,
        )

    @property
    def nbytes_fetched(self) -> int:
        """Count the bytes of files that came over the network, in this process."""
        return self._receipt.nbytes_fetched

    @property
    def nbytes_verified(self) -> int:
        """Count the bytes that were hashed and found right, fetched now or there before."""
        return self._receipt.nbytes_verified

    def stop(self) -> None:
        """End every transfer of every thread soon, with `Interrupted`; what came is kept."""
        self._stopped.set()

    def settings(self, checkpoint: Checkpoint, *, code: bool = False) -> Path:
        """Bring config, tokenizer and index, and Python files only if `code`; return the folder."""
        if checkpoint.commit is not None:
            job = _job(checkpoint)
            files = self.listing.files(job.repo, job.commit)
            placed = settings_of(files, checkpoint.ref.subfolder, code=code)
            if not any(file.path.rpartition("/")[2] == "config.json" for file, _ in placed):
                raise HubError(
                    f"there is no `config.json` in `{checkpoint.ref}`",
                    hint="audit a revision that has one",
                )
            self._bringer.bring(job, placed, seen=False)
        return folder_of(checkpoint)

    def weights(self, checkpoint: Checkpoint) -> Path:
        """Fetch every file of weights and their index; return their folder."""
        if checkpoint.commit is not None:
            job = _job(checkpoint)
            self._claims.take(job.claim)
            self._bringer.bring(job, self._index(checkpoint), seen=False)
            self._bringer.bring(job, _weights(checkpoint))
        return folder_of(checkpoint)

    def text(self, text: TextFile) -> Path:
        """Bring a text of a dataset; return where it lies."""
        job = Job(text.repo, text.commit, text.commit, text.source, "dataset")
        self._bringer.bring(job, [(_file(text.path, text.nbytes, text.sha256), text.path)])
        return text_path(text)

    def files(
        self, repo: str, commit: str, what: str, files: Sequence[HubFile], *, seen: bool = True
    ) -> Path:
        """Bring small files of a model's repository; return the folder of their commit."""
        job = Job(repo, commit, commit, what)
        self._bringer.bring(job, [(file, file.path) for file in files], seen=seen)
        return snapshot(repo, commit)

    def nbytes_missing(self, checkpoint: Checkpoint) -> int:
        """Return how many bytes of weights are not on this machine, by sizes alone."""
        if checkpoint.commit is None:
            return 0
        return _job(checkpoint).nbytes_missing(_weights(checkpoint))

    def evict(self, checkpoint: Checkpoint, *, keep: Iterable[Checkpoint] = ()) -> int:
        """Remove weights that this tool downloaded and no checkpoint needs; return bytes freed."""
        if checkpoint.commit is None:
            return 0
        job = _job(checkpoint)
        kept = [c for c in keep if c.commit is not None and c.ref.location == job.repo]
        with self._claims.alone(job.claim) as alone:
            if not alone:
                self.watch.said(f"{job.what} is used by another scan, so it stays on the disk")
                return 0
            freed = evict(
                job.cache,
                self._ledger,
                [(job.pointer(path), file.blob) for file, path in _weights(checkpoint)],
                kept_links={_job(c).pointer(path) for c in kept for _, path in _weights(c)},
                kept_blobs={file.blob for c in kept for file, _ in _weights(c)},
            )
        if any(c.commit == job.commit for c in kept):
            self._claims.take(job.claim)
        return freed

    def _index(self, checkpoint: Checkpoint) -> Sequence[Placed]:
        """Return the index of the shards; a single file under its usual name needs none."""
        names = [file.name for file in checkpoint.files]
        if names in ([], ["model.safetensors"], ["pytorch_model.bin"]):
            return ()
        files = self.listing.files(checkpoint.ref.location, str(checkpoint.commit))
        pickled = all(name.endswith(".bin") for name in names)
        return index_of(files, checkpoint.ref.subfolder, pickled=pickled)


def _job(checkpoint: Checkpoint) -> Job:
    commit = str(checkpoint.commit)
    revision = checkpoint.ref.revision or commit
    return Job(checkpoint.ref.location, commit, revision, checkpoint.label)


def _weights(checkpoint: Checkpoint) -> list[Placed]:
    """Return the weights as files of the repository, where they lie."""
    start = f"{checkpoint.ref.subfolder}/" if checkpoint.ref.subfolder else ""
    return [
        (_file(f"{start}{file.name}", file.nbytes, file.sha256), f"{start}{file.name}")
        for file in checkpoint.files
    ]


def _file(path: str, nbytes: int, identity: str) -> HubFile:
    """Return a file by what stands for its bytes: a sha256, or the id that git gives them."""
    if identity.startswith("git:"):
        return HubFile(path, nbytes, identity.removeprefix("git:"), None)
    return HubFile(path, nbytes, "", identity)
