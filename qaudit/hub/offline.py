"""The cache that every Hugging Face tool shares, read as a listing of the Hub.

For work without a network alone, where nothing is known from the Hub itself. A download of a
repository leaves all that is needed: the commits of its names, and for each commit either the tree
as the Hub lists it or at least the files that came.

    refs/<name>              a commit; a name with slashes is in folders
    trees/<commit>.json      every file of the commit, whether it came or not
    snapshots/<commit>/...   a link into blobs for each file that came
    blobs/<hash>             the bytes; their name is their sha256, or the id that git gives them

The checks are those of an answer of the Hub. No folder that is a link is walked into, and a file
counts only if its link leads to a regular file among the repository's own blobs.

Given up: `refs` does not tell branches from tags, so all are branches. A snapshot does not tell
what never came. And where links could not be made (some Windows disks), a file's name says nothing
of its hash, so that without `trees` such a file is not listed.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qaudit.checkpoints.places import repo_folder, snapshot
from qaudit.hub.answers import (
    HubFile,
    Kind,
    Revision,
    files_in,
    git_id_of,
    is_commit,
    is_repository,
    revisions_in,
    tree_entry,
)
from qaudit.hub.cache import BLOB, not_read

_FORMAT = 1  # of `trees`; another one is as good as none, for the client too
_LARGEST_TREE_NBYTES = 1 << 28
_LONGEST_REF_NBYTES = 100
_HALF_WRITTEN = re.compile(r".*\.[0-9a-f]{8}\.tmp", re.DOTALL)  # a ref, by a client that was killed


def revisions_of(repo: str, kind: Kind = "model") -> tuple[Revision, ...]:
    """Return the names under which a repository was downloaded; one bad name refuses all."""
    if not is_repository(repo):
        return ()
    folder = repo_folder(repo, kind) / "refs"
    entries = []
    for path in _below(folder):
        if _size(path) is not None and not _HALF_WRITTEN.fullmatch(path.name):
            commit = _read(path, 0, _LONGEST_REF_NBYTES).decode("ascii", "replace").strip()
            name = path.relative_to(folder).as_posix()
            entries.append({"name": name, "targetCommit": commit})
    entries.sort(key=lambda entry: entry["name"])
    return revisions_in({"branches": entries, "tags": []})


def commits_of(repo: str, kind: Kind = "model") -> tuple[str, ...]:
    """Return the commits that have files in the cache, under whatever name they came."""
    folder = repo_folder(repo, kind) / "snapshots"
    if not is_repository(repo) or not _is_folder(folder):
        return ()
    try:
        return tuple(sorted(path.name for path in folder.iterdir() if is_commit(path.name)))
    except OSError as error:
        raise not_read(folder, error) from error


def tree_of(repo: str, commit: str, kind: Kind = "model") -> tuple[HubFile, ...] | None:
    """Return every file of a commit from the client's own record, if there is one."""
    if not is_repository(repo) or not is_commit(commit):
        return None
    path = repo_folder(repo, kind) / "trees" / f"{commit}.json"
    if not _is_folder(path.parent) or _size(path) is None:
        return None
    try:
        table = json.loads(_read(path, 0, _LARGEST_TREE_NBYTES))
        if table["format_version"] != _FORMAT:
            return None
        return files_in([[_entry(name, about) for name, about in table["files"].items()]])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # damaged: the snapshot itself says what came


def files_of(repo: str, commit: str, kind: Kind = "model") -> tuple[HubFile, ...]:
    """Return the files of a commit that are in the cache whole; one bad name refuses all."""
    if not is_repository(repo) or not is_commit(commit):
        return ()
    top, blobs = snapshot(repo, commit, kind), repo_folder(repo, kind) / "blobs"
    if not _is_folder(top.parent):
        return ()
    linked = [(link, _blob_behind(link, blobs)) for link in _below(top)]
    files = [_file(link.relative_to(top).as_posix(), *blob) for link, blob in linked if blob]
    return files_in([[tree_entry(file) for file in files]])


def bytes_of(repo: str, file: HubFile, start: int, stop: int, kind: Kind = "model") -> bytes | None:
    """Return a range of a file's bytes if all of the file is in the cache."""
    if not is_repository(repo) or not BLOB.fullmatch(file.blob):
        return None
    blob = repo_folder(repo, kind) / "blobs" / file.blob
    return _read(blob, start, stop) if _size(blob) == file.nbytes else None


def _entry(path: str, about: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of the client's record in the form of the Hub's tree."""
    entry = {"type": "file", "path": path, "size": about["size"], "oid": about["blob_id"]}
    if about.get("lfs_sha256") is None:
        return entry
    return {**entry, "lfs": {"oid": about["lfs_sha256"], "size": about.get("lfs_size")}}


def _file(path: str, blob: str, nbytes: int) -> HubFile:
    if len(blob) == 40:
        return HubFile(path, nbytes, blob, None)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{blob}\nsize {nbytes}\n"
    return HubFile(path, nbytes, git_id_of(pointer.encode()), blob)  # git keeps the pointer


def _blob_behind(link: Path, blobs: Path) -> tuple[str, int] | None:
    """Return name and size of the blob that a link leads to, if it is among the blobs."""
    if not link.is_symlink():
        return None
    real = os.path.realpath(link)
    blob = blobs / Path(real).name
    nbytes = _size(blob) if BLOB.fullmatch(blob.name) else None
    return None if nbytes is None or os.path.realpath(blob) != real else (blob.name, nbytes)


def _below(top: Path) -> Iterator[Path]:
    """Yield everything that is no folder, at any depth; no link is followed."""

    def refuse(error: OSError) -> None:
        raise not_read(Path(error.filename or top), error) from error  # a hole is no listing

    if _is_folder(top):
        for folder, _, names in os.walk(top, onerror=refuse):
            yield from (Path(folder, name) for name in names)


def _is_folder(path: Path) -> bool:
    status = _status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _size(path: Path) -> int | None:
    """Return the size of a regular file; a link to one is none."""
    status = _status(path)
    return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise not_read(path, error) from error


def _read(path: Path, start: int, stop: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)
    except OSError as error:
        raise not_read(path, error) from error
