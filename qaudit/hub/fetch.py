"""Checkpoints from the Hub onto this machine: resumed, verified, shared, and evicted again.

Files are stored where every Hugging Face tool keeps them (`cache`), so that other tools use what
a scan fetched, and what was there already is never fetched twice. Bytes are hashed as they come
(`transfer`), and files that were there are hashed once and remembered by their stamp, because
hashing 30 GB takes a minute.

The small files stay when weights are evicted. A checkpoint without a commit is a local folder:
there is nothing to fetch and nothing to evict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.checkpoints.places import folder_of, is_gguf, snapshot, text_path, weights_of
from qaudit.errors import HubError
from qaudit.hub.answers import HubFile
from qaudit.hub.downloader import Downloader, Snapshot
from qaudit.hub.holdings import Claims, evict
from qaudit.hub.records import Ledger
from qaudit.hub.transfer import Source
from qaudit.hub.weights import PlacedFile, index_file, settings_files, weights_on_hub
from qaudit.types import SILENT, Checkpoint, TextFile, Watch

if TYPE_CHECKING:
    from qaudit.hub.listing import Listing


class Fetcher:
    """Fetches and evicts the files of checkpoints; may be used by several threads."""

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
        """Without a `pause` of its own, waiting ends when `stop` is called."""
        self.client, self.listing, self.watch = client, listing, watch
        self._ledger, self._claims = Ledger(), Claims()
        self._downloader = Downloader(client, self._ledger, watch, workers, tries, pause)

    @property
    def nbytes_fetched(self) -> int:
        return self._downloader.nbytes_fetched

    @property
    def nbytes_verified(self) -> int:
        """Return the bytes of files that were hashed and found right, fetched now or before."""
        return self._downloader.nbytes_verified

    def stop(self) -> None:
        """End every transfer of every thread soon, with `Interrupted`; partial files stay."""
        self._downloader.stopped.set()

    def settings(self, checkpoint: Checkpoint, *, code: bool = False) -> Path:
        """Fetch config, tokenizer and index, and Python files only if `code`; return the folder."""
        folder = folder_of(checkpoint)
        if checkpoint.commit is not None and weights_of(checkpoint, folder) == folder:
            commit = _snapshot(checkpoint)
            files = self.listing.files(commit.repo, commit.commit)
            placed = settings_files(files, checkpoint.ref.subfolder, code=code)
            if not any(file.path.rpartition("/")[2] == "config.json" for file, _ in placed):
                raise HubError(
                    f"there is no `config.json` in `{checkpoint.ref}`",
                    hint="audit a revision that has one",
                )
            self._downloader.download(commit, placed, show=False)
        return folder

    def weights(self, checkpoint: Checkpoint) -> Path:
        if checkpoint.commit is not None:
            commit = _snapshot(checkpoint)
            self._claims.take(commit.claim)
            self._downloader.download(commit, self._index(checkpoint), show=False)
            self._downloader.download(commit, _weights(checkpoint))
        return folder_of(checkpoint)

    def text(self, text: TextFile) -> Path:
        commit = Snapshot(text.repo, text.commit, text.commit, text.source, "dataset")
        file = HubFile.identified(text.path, text.nbytes, text.sha256)
        self._downloader.download(commit, [(file, text.path)])
        return text_path(text)

    def files(
        self, repo: str, commit: str, what: str, files: Sequence[HubFile], *, show: bool = True
    ) -> Path:
        placed = [(file, file.path) for file in files]
        self._downloader.download(Snapshot(repo, commit, commit, what), placed, show=show)
        return snapshot(repo, commit)

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
                commit.cache,
                self._ledger,
                [(commit.pointer(path), file.blob) for file, path in _weights(checkpoint)],
                keep_links={_snapshot(c).pointer(path) for c in kept for _, path in _weights(c)},
                keep_blobs={file.blob for c in kept for file, _ in _weights(c)},
            )
        if any(c.commit == commit.commit for c in kept):
            self._claims.take(commit.claim)
        return freed

    def _index(self, checkpoint: Checkpoint) -> Sequence[PlacedFile]:
        names = [file.name for file in checkpoint.files]
        if names in ([], ["model.safetensors"], ["pytorch_model.bin"]) or is_gguf("".join(names)):
            return ()  # a single file needs none
        files = self.listing.files(checkpoint.ref.location, str(checkpoint.commit))
        pickled = all(name.endswith(".bin") for name in names)
        return index_file(files, checkpoint.ref.subfolder, pickled=pickled)


def _snapshot(checkpoint: Checkpoint) -> Snapshot:
    commit = str(checkpoint.commit)
    revision = checkpoint.ref.revision or commit
    return Snapshot(checkpoint.ref.location, commit, revision, checkpoint.label)


def _weights(checkpoint: Checkpoint) -> list[PlacedFile]:
    return [(file, file.path) for file in weights_on_hub(checkpoint)]
