"""What the Hub has, asked as rarely as can be: names once, trees and headers once for ever.

A commit never changes, so its tree is asked once and kept; a file is what its hash says, so
the header of a file of weights is read once, whichever revisions and names it serves under.
Only names move. They are asked once in every process, and what is kept of them is for work
without a network alone, which says how old it is. Nothing kept is believed more than what
comes over the wire: it passes the same checks, and what fails them is asked again. Without a
network, and where nothing is kept, the shared cache speaks for the Hub (`shelf`).

Headers come by byte ranges: one request has most of them whole, because the first one asks for
more than eight bytes. No range carries a checksum, so shapes price a plan; what is measured is
read from files whose hashes were checked.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from qaudit.checkpoints.header import header_nbytes, tensors_in
from qaudit.checkpoints.places import own_cache, repo_folder, snapshot
from qaudit.core.keys import nearest
from qaudit.errors import HubError, SourceError
from qaudit.hub import shelf
from qaudit.hub.answers import (
    GarbledError,
    files_in,
    is_commit,
    revisions_in,
    shapes_in,
)
from qaudit.hub.client import Client
from qaudit.hub.entries import HubFile, Kind, Revision
from qaudit.hub.kept import Kept
from qaudit.hub.refusals import Asked, no_revision, not_known_offline

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor -> its dtype and its shape."""

FIRST_NBYTES = 1 << 17
"""What the first request for a header asks for: enough for a block count of any 7B model."""


class Listing:
    """A client with a memory; may be used by several threads."""

    def __init__(self, client: Client, folder: Path | None = None) -> None:
        """Keep what is learned in `folder`, or where qaudit keeps such things."""
        self.client = client
        self._kept = Kept(folder or own_cache() / "hub", client.say)
        self._revisions: dict[tuple[str, Kind], tuple[Revision, ...]] = {}
        self._files: dict[tuple[str, str, Kind], tuple[HubFile, ...]] = {}
        self._shapes: dict[str, Shapes] = {}
        self._lying: set[tuple[str, ...]] = set()  # what the shared cache told, and not the Hub
        self._asking = Lock()

    def revisions(self, repo: str, kind: Kind = "model") -> tuple[Revision, ...]:
        """Return branches and tags: as they are now, or offline as they were last seen.

        Offline, a repository that was never seen has the names under which it was downloaded.
        """
        with self._asking:
            if (repo, kind) not in self._revisions:
                online = not self.client.offline
                found = self._asked(repo, kind) if online else self._remembered(repo, kind)
                self._revisions[repo, kind] = found
            return self._revisions[repo, kind]

    def commit(self, repo: str, revision: str = "main", kind: Kind = "model") -> str:
        """Return the full commit of a branch, a tag, a pull request or a short id."""
        if is_commit(revision):
            return revision
        known = self.revisions(repo, kind)
        for found in known:  # branches come first, as git has it
            if revision in (found.name, f"refs/{_FOLDERS[found.kind]}/{found.name}"):
                return found.commit
        if revision.startswith("refs/") or _may_be_a_commit(revision):
            return self.client.commit(repo, revision, kind)
        near = nearest(revision, [found.name for found in known])
        hint = near if near.startswith("did you mean") else ""
        if (repo, kind) in self._lying:
            raise not_known_offline(Asked(f"`{revision}` of `{repo}`", repo, kind), hint)
        raise no_revision(Asked("", repo, kind, revision), hint)

    def files(self, repo: str, commit: str, kind: Kind = "model") -> tuple[HubFile, ...]:
        """Return every file at a commit."""
        known = self.known_files(repo, commit, kind)
        if known is not None:
            return known
        found = self.client.files(repo, commit, kind=kind)
        self._kept.keep("trees", self._key(repo, kind, commit), [_entry(file) for file in found])
        self._files[repo, commit, kind] = found
        return found

    def known_files(
        self, repo: str, commit: str, kind: Kind = "model"
    ) -> tuple[HubFile, ...] | None:
        """Return every file at a commit if that is known without asking."""
        key = (repo, commit, kind)
        if key not in self._files:
            kept = self._kept.find("trees", self._key(repo, kind, commit))
            try:
                self._files[key] = files_in([kept])
            except GarbledError:
                if (lying := self._files_lying(*key) if self.client.offline else ()) == ():
                    return None
                self._files[key] = lying
        return self._files[key]

    def is_partial(self, repo: str, commit: str, kind: Kind = "model") -> bool:
        """Say whether files of a commit are what lies here: the Hub may have more of them."""
        return (repo, commit, kind) in self._lying

    def file(self, repo: str, commit: str, path: str, kind: Kind = "model") -> HubFile:
        """Return one file at a commit, without the rest of its tree."""
        key = self._key(repo, kind, commit, path)
        try:
            found = files_in([self._kept.find("files", key)])
        except GarbledError:
            found = ()
        if not found and self.client.offline:
            found = tuple(f for f in self.known_files(repo, commit, kind) or () if f.path == path)
        if [file.path for file in found] == [path]:
            return found[0]
        asked = self.client.file(repo, commit, path, kind=kind)
        self._kept.keep("files", key, [_entry(asked)])
        return asked

    def shapes(self, repo: str, commit: str, files: Sequence[HubFile]) -> Shapes:
        """Return the tensors of safetensors files that make up one checkpoint."""
        found = []
        for file in files:
            known = self._known(file)
            found.append(self._read_header(repo, commit, file) if known is None else known)
        return _together(repo, files, found)

    def known_shapes(self, repo: str, commit: str, files: Sequence[HubFile]) -> Shapes | None:
        """Return the tensors of safetensors files if they are known without asking."""
        known = [self._known(file) for file in files]
        found = [shapes for shapes in known if shapes is not None]
        return _together(repo, files, found) if len(found) == len(files) else None

    def read(self, repo: str, commit: str, file: HubFile, start: int, stop: int) -> bytes:
        """Return a range of a file's bytes, offline from the shared cache if they are there."""
        if stop <= start:
            return b""
        if self.client.offline:
            lying = shelf.bytes_of(repo, file, start, stop)
            if lying is not None:
                return lying
        return self.client.read(repo, commit, file.path, start, stop, blob=file.blob)

    # ------------------------------------------------------------------------------------ names

    def _asked(self, repo: str, kind: Kind) -> tuple[Revision, ...]:
        found = self.client.revisions(repo, kind)
        answer = {
            "at": int(time.time()),
            **{
                key: [
                    {"name": revision.name, "targetCommit": revision.commit}
                    for revision in found
                    if revision.kind == name
                ]
                for name, key in (("branch", "branches"), ("tag", "tags"))
            },
        }
        self._kept.keep("revisions", self._key(repo, kind), answer)
        return found

    def _remembered(self, repo: str, kind: Kind) -> tuple[Revision, ...]:
        kept = self._kept.find("revisions", self._key(repo, kind))
        try:
            found, at = revisions_in(kept), float(kept["at"])
            day = time.strftime("%Y-%m-%d", time.gmtime(at))
        except (GarbledError, KeyError, TypeError, ValueError, OverflowError):
            return self._names_lying(repo, kind)
        self.client.say(f"offline: the revisions of `{repo}` are those of {day}")
        return found

    # -------------------------------------------------------------------------- the shared cache

    def _names_lying(self, repo: str, kind: Kind) -> tuple[Revision, ...]:
        asked = Asked(f"the revisions of `{repo}`", repo, kind)
        try:
            found = shelf.names_of(repo, kind)
        except GarbledError as error:
            raise HubError(
                f"{asked.call} in the shared cache cannot be believed: {error}",
                hint=f"remove what is wrong in `{repo_folder(repo, kind) / 'refs'}`",
            ) from error
        if not found:
            hints = (
                f"it was downloaded without a name: write `{repo}@{commit}`"
                for commit in shelf.commits_of(repo, kind)
            )
            raise not_known_offline(asked, next(hints, ""))
        self.client.say(f"offline: the revisions of `{repo}` are those that were downloaded")
        self._lying.add((repo, kind))
        return found

    def _files_lying(self, repo: str, commit: str, kind: Kind) -> tuple[HubFile, ...]:
        """Return the files of a commit by what the shared cache tells, if anything."""
        told = shelf.tree_of(repo, commit, kind)
        if told is not None:
            return told
        try:
            found = shelf.files_of(repo, commit, kind)
        except GarbledError as error:
            where = snapshot(repo, commit, kind)
            self.client.say(f"offline: `{where}` is left out, it cannot be believed: {error}")
            return ()
        if found:
            self.client.say(f"offline: of `{repo}` at `{commit}` only what lies here is known")
            self._lying.add((repo, commit, kind))
        return found

    # ---------------------------------------------------------------------------------- headers

    def _known(self, file: HubFile) -> Shapes | None:
        if file.identity not in self._shapes:
            kept = self._kept.find("headers", self._key(file.identity, str(file.nbytes)))
            try:
                self._shapes[file.identity] = shapes_in(kept)
            except GarbledError:
                return None
        return self._shapes[file.identity]

    def _read_header(self, repo: str, commit: str, file: HubFile) -> Shapes:
        """Read the header of one file by byte ranges; most need one range."""
        path, size = PurePosixPath(repo, file.path), file.nbytes
        try:
            first = self.read(repo, commit, file, 0, min(FIRST_NBYTES, size))
            end = 8 + header_nbytes(path, first, size)
            rest = self.read(repo, commit, file, len(first), end) if end > len(first) else b""
            tensors = tensors_in(path, (first + rest)[8:end], size)
        except SourceError as error:
            if isinstance(error, HubError):
                raise
            raise HubError(
                f"{error.message}, at {self._named(repo, commit)}",
                hint="it is damaged on the Hub itself; leave this revision out",
            ) from error
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        kept = [[name, dtype, list(shape)] for name, (dtype, shape) in found.items()]
        self._kept.keep("headers", self._key(file.identity, str(size)), kept)
        self._shapes[file.identity] = found
        return found

    def _named(self, repo: str, commit: str) -> str:
        """Return a commit with the names that lead to it, as far as they were read."""
        names = [
            f"`{r.name}`" for r in self._revisions.get((repo, "model"), ()) if r.commit == commit
        ]
        return f"{', '.join(names[:3])} (`{commit}`)" if names else f"`{commit}`"

    def _key(self, *parts: str) -> list[str]:
        return [self.client.endpoint, *parts]


_FOLDERS = {"branch": "heads", "tag": "tags"}


def _may_be_a_commit(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{7,39}", text) is not None


def _entry(file: HubFile) -> dict[str, Any]:
    """Write a file as the Hub tells it, so that one reader serves both."""
    entry = {"type": "file", "path": file.path, "size": file.nbytes, "oid": file.git_id}
    lfs = {"oid": file.sha256, "size": file.nbytes}
    return entry if file.sha256 is None else {**entry, "lfs": lfs}


def _together(repo: str, files: Sequence[HubFile], found: Sequence[Shapes]) -> Shapes:
    """Return the tensors of all files; a tensor that is in two of them is refused."""
    tensors: Shapes = {}
    for file, shapes in zip(files, found, strict=True):
        if twice := sorted(tensors.keys() & shapes.keys()):
            raise HubError(
                f"tensor `{twice[0]}` is in `{file.path}` of `{repo}` and in another shard",
                hint="these files are not the shards of one checkpoint; leave this revision out",
            )
        tensors |= shapes
    return tensors
