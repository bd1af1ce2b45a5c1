"""The ids that git itself would give: of blobs, LFS pointers, trees and commits.

Real ids, because they are what a client stores, compares and calls its files by; a made-up one
would let a wrong hash in our own code pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from tests.support.hub.contents import Contents, InMemory, OnDisk

LFS_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf", ".npz"),
    *(".parquet", ".gz", ".zst"),
)
LFS_NBYTES = 10 * 1024 * 1024
ATTRIBUTES = "".join(f"*{s} filter=lfs diff=lfs merge=lfs -text\n" for s in LFS_SUFFIXES).encode()


def git_id(kind: str, data: bytes) -> str:
    """Return the sha1 that git gives to an object."""
    return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(data)) + data).hexdigest()


def pointer(sha256: str, nbytes: int) -> bytes:
    """Return the text that git keeps in place of a large file."""
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {nbytes}\n".encode()
    )


def is_large(name: str, nbytes: int) -> bool:
    """Say whether a file is kept by LFS rather than in git."""
    return name.endswith(LFS_SUFFIXES) or nbytes >= LFS_NBYTES


@dataclass(frozen=True)
class Blob:
    """One content, known by its git id and, if LFS keeps it, by its sha256."""

    git_id: str
    contents: Contents
    sha256: str | None = None

    @property
    def nbytes(self) -> int:
        return self.contents.nbytes

    @property
    def etag(self) -> str:
        """What the Hub names the content by: a client's cache calls the file that."""
        return self.sha256 or self.git_id

    @property
    def xet_hash(self) -> str:
        """Not a real xet hash, only of the right shape."""
        return hashlib.sha256(b"xet" + self.etag.encode()).hexdigest()

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from `start` to `stop` in pieces."""
        return self.contents.read(start, self.nbytes if stop is None else stop)

    def whole(self) -> bytes:
        """Return every byte."""
        return b"".join(self.read())


def blob_of(name: str, contents: Contents, *, sha256: str | None = None) -> Blob:
    """Return the blob of a file; a `sha256` that is given is believed and nothing is read."""
    if not is_large(name, contents.nbytes):
        data = b"".join(contents.read(0, contents.nbytes))
        return Blob(git_id("blob", data), contents)
    if sha256 is None:
        digest = hashlib.sha256()
        for piece in contents.read(0, contents.nbytes):
            digest.update(piece)
        sha256 = digest.hexdigest()
    return Blob(git_id("blob", pointer(sha256, contents.nbytes)), contents, sha256)


def blob_on_disk(path: Path) -> Blob:
    """Return the blob of a file on disk; what has not changed since is hashed once."""
    status = path.stat()
    return _blob_on_disk(path, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=4096)
def _blob_on_disk(path: Path, nbytes: int, _changed: int, _inode: int) -> Blob:
    return blob_of(path.name, OnDisk(path, nbytes))


def blob_in_memory(name: str, data: bytes) -> Blob:
    """Return the blob of a file that is nowhere on disk."""
    return blob_of(name, InMemory(data))


def tree_ids(files: Mapping[str, Blob]) -> dict[str, str]:
    """Return the git id of every folder; the root's name is empty."""
    ids: dict[str, str] = {}

    def note(folder: str, inside: Mapping[str, Blob]) -> str:
        entries: list[tuple[bytes, bytes, str]] = []  # sort key, mode and name, id
        folders: dict[str, dict[str, Blob]] = {}
        for path, blob in inside.items():
            head, slash, rest = path.partition("/")
            if slash:
                folders.setdefault(head, {})[rest] = blob
            else:
                entries.append((head.encode(), b"100644 " + head.encode(), blob.git_id))
        for head, below in folders.items():  # git sorts a folder as if its name ended in a slash
            child = note(f"{folder}/{head}".lstrip("/"), below)
            entries.append((f"{head}/".encode(), b"40000 " + head.encode(), child))
        text = b"".join(named + b"\0" + bytes.fromhex(id_) for _, named, id_ in sorted(entries))
        ids[folder] = git_id("tree", text)
        return ids[folder]

    note("", files)
    return ids


@dataclass(frozen=True)
class Commit:
    """The files of a repo at one moment."""

    id: str
    files: Mapping[str, Blob]
    folders: Mapping[str, str]  # folder -> git id; the root's name is empty
    title: str
    message: str
    date: datetime
    author: str
    parent: str | None


def commit_of(
    files: Mapping[str, Blob],
    title: str,
    *,
    message: str = "",
    date: datetime,
    author: str,
    parent: str | None,
) -> Commit:
    """Return a commit with the id that git would give it."""
    folders = tree_ids(files)
    who = f"{author} <{author}@hub.test> {int(date.timestamp())} +0000"
    lines = [f"tree {folders['']}", *([f"parent {parent}"] if parent else [])]
    lines += [f"author {who}", f"committer {who}", "", title, *(["", message] if message else [])]
    oid = git_id("commit", "\n".join([*lines, ""]).encode())
    return Commit(oid, dict(files), folders, title, message, date, author, parent)
