"""The Hub's names, trees and headers, with as few requests as can be.

A commit never changes, so its tree is fetched once and kept for ever; a file is what its hash
says, so the header of a file of weights is read once, whichever revisions and names it serves
under. Only names move. They are fetched once in every process, and those on disk are for work
without a network alone, with a message that says how old they are. What is on disk passes the
same checks as an answer of the Hub, and what fails them is fetched again. Without a network,
where nothing is kept, what is in the shared cache stands for the Hub: its
names, and the files that came. What never came is not known then.

Headers come by byte ranges: one request has most of them whole, because the first one is for more
than eight bytes. No range carries a checksum, so shapes price a plan; what is measured is read
from files whose hashes were checked.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any, TypeVar

from qaudit.checkpoints.header import header_nbytes, tensors_in
from qaudit.checkpoints.stamps import own_cache, repo_folder
from qaudit.errors import HubError, MachineError, SourceError
from qaudit.hub.answers import (
    GarbledError,
    HubFile,
    Kind,
    Request,
    Revision,
    files_in,
    is_commit,
    no_revision,
    not_known_offline,
    plain_path,
    revisions_in,
    shapes_in,
)
from qaudit.hub.api import Client
from qaudit.hub.cache import BLOB, Snapshot, file_size, not_read
from qaudit.support.keys import nearest
from qaudit.types import digest
from qaudit.whole import write_whole

T = TypeVar("T")
Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor -> its dtype and its shape."""

FIRST_NBYTES = 1 << 17
"""The size of the first request for a header: enough for a block count of any 7B model."""

_FOLDERS = {"branch": "heads", "tag": "tags"}
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")
_STORE_VERSION = 1


class Listing:
    """A client with a memory; may be used by several threads.

    What it learns is in a folder, an answer in each small JSON file. File names are digests, so
    that no name from the network is ever a path. The key is written inside and compared when it is
    read, so that a file copied to another place has no effect. An answer that the disk does not
    take is fetched again the next time.
    """

    def __init__(self, client: Client, folder: Path | None = None) -> None:
        self.client = client
        self._folder = folder or own_cache() / "hub"
        self._revisions: dict[tuple[str, Kind], tuple[Revision, ...]] = {}
        self._files: dict[tuple[str, str, Kind], tuple[HubFile, ...]] = {}
        self._shapes: dict[str, Shapes] = {}
        self._incomplete: set[tuple[str, ...]] = set()  # known from the shared cache alone
        self._requesting = Lock()

    def revisions(self, repo: str, kind: Kind = "model") -> tuple[Revision, ...]:
        """Return branches and tags: as they are now, or offline as they were last seen.

        Offline, a repository that was never seen has the names under which it was downloaded.
        """
        with self._requesting:
            if (repo, kind) not in self._revisions:
                key = ("revisions", repo, kind)
                if not self.client.offline:
                    revisions = self.client.revisions(repo, kind)
                    rows = list(map(astuple, revisions))
                    self._record(key, {"at": int(time.time()), "revisions": rows})
                elif (dated := self._recorded(key, _dated_revisions)) is not None:
                    day, revisions = dated
                    self.client.say(f"offline: the revisions of `{repo}` are those of {day}")
                else:
                    revisions = self._revisions_in_cache(repo, kind)
                self._revisions[repo, kind] = revisions
            return self._revisions[repo, kind]

    def commit(self, repo: str, revision: str = "main", kind: Kind = "model") -> str:
        if is_commit(revision):
            return revision
        revisions = self.revisions(repo, kind)
        for branch in revisions:  # branches come first, as git has it
            if revision in (branch.name, f"refs/{_FOLDERS[branch.kind]}/{branch.name}"):
                return branch.commit
        if revision.startswith("refs/") or _SHORT_COMMIT.fullmatch(revision):
            return self.client.commit(repo, revision, kind)
        near = nearest(revision, [candidate.name for candidate in revisions])
        hint = near if near.startswith("did you mean") else ""
        if (repo, kind) in self._incomplete:
            raise not_known_offline(Request(f"`{revision}` of `{repo}`", repo, kind), hint)
        raise no_revision(Request("", repo, kind, revision), hint)

    def files(self, repo: str, commit: str, kind: Kind = "model") -> tuple[HubFile, ...]:
        files = self.known_files(repo, commit, kind)
        if files is None:
            files = self._files[repo, commit, kind] = self.client.files(repo, commit, kind=kind)
            self._record(("trees", repo, kind, commit), list(map(astuple, files)))
        return files

    def known_files(
        self, repo: str, commit: str, kind: Kind = "model"
    ) -> tuple[HubFile, ...] | None:
        """Return every file at a commit if that is known without a request."""
        key = (repo, commit, kind)
        if key not in self._files:
            files = self._recorded(("trees", repo, kind, commit), files_in)
            if files is None:
                files = (self.client.offline and self._files_in_cache(*key)) or None
            if files is None:
                return None
            self._files[key] = files
        return self._files[key]

    def is_partial(self, repo: str, commit: str) -> bool:
        """Return whether only files in the cache are known: the Hub may have more of them."""
        return (repo, commit, "model") in self._incomplete

    def file(self, repo: str, commit: str, path: str, kind: Kind = "model") -> HubFile:
        """Return one file at a commit, without the rest of its tree."""
        key = ("files", repo, kind, commit, path)
        files = self._recorded(key, files_in)
        if not files and self.client.offline:
            files = tuple(f for f in self.known_files(repo, commit, kind) or () if f.path == path)
        if files and [file.path for file in files] == [path]:
            return files[0]
        file = self.client.file(repo, commit, path, kind=kind)
        self._record(key, [astuple(file)])
        return file

    def shapes(self, repo: str, commit: str, files: Sequence[HubFile]) -> Shapes:
        """Return the tensors of all files; a tensor that is in two of them is refused."""
        tensors: Shapes = {}
        for file in files:
            shapes = self._shapes.get(file.identity)
            if shapes is None:
                key = ("headers", file.identity, str(file.nbytes))
                shapes = self._recorded(key, shapes_in)
                if shapes is None:
                    shapes = self._read_header(repo, commit, file)
                    self._record(key, [[name, *entry] for name, entry in shapes.items()])
                self._shapes[file.identity] = shapes
            if twice := sorted(tensors.keys() & shapes.keys()):
                raise HubError(
                    f"tensor `{twice[0]}` is in `{file.path}` of `{repo}` and in another shard",
                    hint="these files are not the shards of one checkpoint; "
                    "leave this revision out",
                )
            tensors |= shapes
        return tensors

    def read(self, repo: str, commit: str, file: HubFile, start: int, stop: int) -> bytes:
        """Return a range of a file's bytes, offline from the shared cache if they are there."""
        if stop <= start:
            return b""
        blob = Snapshot(repo).blob(file.blob)
        if self.client.offline and file_size(blob) == file.nbytes:
            try:
                with blob.open("rb") as handle:
                    handle.seek(start)
                    return handle.read(stop - start)
            except OSError as error:
                raise not_read(blob, error) from error
        return self.client.read(repo, commit, file, start, stop)

    def _revisions_in_cache(self, repo: str, kind: Kind) -> tuple[Revision, ...]:
        request, folder = Request(f"the revisions of `{repo}`", repo, kind), repo_folder(repo, kind)
        refs = folder / "refs"
        try:
            named = [(path, path.read_text("utf-8")) for path in refs.rglob("*") if path.is_file()]
            rows = sorted((path.relative_to(refs).as_posix(), commit) for path, commit in named)
            revisions = revisions_in([(name, commit, "branch") for name, commit in rows])
        except OSError as error:
            raise not_read(refs, error) from error
        except ValueError as error:
            raise HubError(
                f"{request.call} in the shared cache cannot be believed: {error}",
                hint=f"remove what is wrong in `{refs}`",
            ) from error
        if not revisions:
            commits = [path.name for path in (folder / "snapshots").glob("*")]
            commit = min(filter(is_commit, commits), default=None)
            hint = f"it was downloaded without a name: write `{repo}@{commit}`" if commit else ""
            raise not_known_offline(request, hint)
        self.client.say(f"offline: the revisions of `{repo}` are those that were downloaded")
        self._incomplete.add((repo, kind))
        return revisions

    def _files_in_cache(self, repo: str, commit: str, kind: Kind) -> tuple[HubFile, ...]:
        """Return the files of a commit whose links lead to blobs of the repository."""
        folder, files = Path(os.path.realpath(repo_folder(repo, kind))), []
        snapshot = folder / "snapshots" / commit
        try:
            for link in snapshot.rglob("*"):
                blob = Path(os.path.realpath(link))
                if blob.parent == folder / "blobs" and BLOB.fullmatch(blob.name):
                    if (nbytes := file_size(blob)) is None:
                        raise HubError(
                            f"what the cache has of `{repo}` is damaged: `{link}` leads nowhere",
                            hint=f"fetch it once more while online, or remove `{folder}`",
                        )
                    identity = blob.name if len(blob.name) == 64 else f"git:{blob.name}"
                    name = plain_path(link.relative_to(snapshot).as_posix(), "the path of a file")
                    files.append(HubFile.identified(name, nbytes, identity))
        except GarbledError as error:
            self.client.say(f"offline: `{snapshot}` is left out, it cannot be believed: {error}")
            return ()
        if files:
            self.client.say(
                f"offline: of `{repo}` at `{commit}` only the files on this machine are known"
            )
            self._incomplete.add((repo, commit, kind))
        return tuple(sorted(files, key=lambda file: file.path))

    def _read_header(self, repo: str, commit: str, file: HubFile) -> Shapes:
        path, size = PurePosixPath(repo, file.path), file.nbytes
        try:
            first = self.read(repo, commit, file, 0, min(FIRST_NBYTES, size))
            end = 8 + header_nbytes(path, first, size)
            rest = self.read(repo, commit, file, len(first), end) if end > len(first) else b""
            tensors = tensors_in(path, (first + rest)[8:end], size)
        except SourceError as error:
            if isinstance(error, HubError):
                raise
            revisions = self._revisions.get((repo, "model"), ())  # as far as they were read
            names = [f"`{r.name}`" for r in revisions if r.commit == commit]
            where = f"{', '.join(names[:3])} (`{commit}`)" if names else f"`{commit}`"
            raise HubError(
                f"{error.message}, at {where}",
                hint="it is damaged on the Hub itself; leave this revision out",
            ) from error
        return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}

    def _path(self, key: Sequence[str]) -> Path:
        return self._folder / f"v{_STORE_VERSION}" / key[0] / f"{digest(self._whole(key))}.json"

    def _whole(self, key: Sequence[str]) -> list[str]:
        """Return the key of an answer of this Hub: its table, the address, and the names."""
        return [key[0], self.client.endpoint, *key[1:]]

    def _recorded(self, key: Sequence[str], parse: Callable[[Any], T]) -> T | None:
        """Return an answer on the disk, if it passes the checks of one that comes."""
        try:
            record = json.loads(self._path(key).read_text(encoding="utf-8"))
            return parse(record["value"]) if record["key"] == self._whole(key) else None
        except (OSError, ValueError, RecursionError, LookupError, TypeError, OverflowError):
            return None

    def _record(self, key: Sequence[str], value: Any) -> None:
        """Write an answer so that it is there whole or not at all."""
        record = {"key": self._whole(key), "value": value}
        with suppress(MachineError):
            write_whole(self._path(key), json.dumps(record, separators=(",", ":")))


def _dated_revisions(value: Any) -> tuple[str, tuple[Revision, ...]]:
    """Read when names were seen, and the names."""
    day = time.strftime("%Y-%m-%d", time.gmtime(float(value["at"])))
    return day, revisions_in(value["revisions"])
