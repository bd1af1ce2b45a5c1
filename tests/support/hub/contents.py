"""Where the bytes of a served file come from: memory, disk, or disk varied by a rule.

The third is what makes a repo with a thousand revisions cheap: every name serves weights of its
own, and the disk holds them once. Anything may be read from the middle, so that ranges work.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

import numpy as np

CHUNK_NBYTES = 256 * 1024
PERIOD_NBYTES = 4096
DTYPE_NBYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}


class Contents(Protocol):
    """Bytes of known number that can be read from anywhere."""

    @property
    def nbytes(self) -> int: ...

    def read(self, start: int, stop: int) -> Iterator[bytes]: ...


@dataclass(frozen=True)
class InMemory:
    """Bytes as they are."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` to `stop` in pieces."""
        for position, count in _pieces(start, stop):
            yield self.data[position : position + count]


@dataclass(frozen=True)
class OnDisk:
    """A file as it is when it is read."""

    path: Path
    nbytes: int

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` to `stop` in pieces."""
        with self.path.open("rb") as file:
            file.seek(start)
            for _, count in _pieces(start, stop):
                yield file.read(count)


@dataclass(frozen=True)
class Varied:
    """A file whose data, behind its header, differs from name to name.

    The low six bits of every other byte are those of the file xor some of the name's. In a
    tensor of bfloat16, float16 or float32 that moves the mantissa alone: what was finite stays
    finite and near to what it was, so that the weights can be used. What the file lacks is zero
    before that, so a file that ends behind its header, or a pretended size, can be read to the end.
    """

    path: Path
    name: str
    header_nbytes: int
    nbytes: int

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` to `stop` in pieces."""
        pattern = np.frombuffer(hashlib.shake_128(self.name.encode()).digest(PERIOD_NBYTES), "u1")
        pattern = pattern & np.tile(np.array([0x3F, 0], dtype="u1"), PERIOD_NBYTES // 2)
        with self.path.open("rb") as file:
            for position, count in _pieces(start, stop):
                file.seek(position)
                data = np.frombuffer(file.read(count).ljust(count, b"\0"), "u1")
                index = np.arange(position, position + count) - self.header_nbytes
                mask = np.where(index >= 0, pattern[index % PERIOD_NBYTES], 0).astype("u1")
                yield (data ^ mask).tobytes()


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for position in range(start, stop, CHUNK_NBYTES):
        yield position, min(CHUNK_NBYTES, stop - position)


def extent_of(path: Path) -> tuple[int, int]:
    """Return where a file's data may be varied from, and how many bytes it then has.

    A safetensors file is as long as its header says, even where the file ends before; any other
    format is left alone and followed by a few bytes of the name's.
    """
    if path.suffix == ".safetensors":
        return header_of(path)
    nbytes = path.stat().st_size
    return nbytes, nbytes + 64


# ---------------------------------------------- safetensors headers without data


def header_of(path: Path) -> tuple[int, int]:
    """Return the bytes of a safetensors header, and those of the file that it describes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + length, 8 + length + max(ends, default=0)


def write_header(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Write a safetensors file that ends behind its header; return what it would be long."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPE_NBYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return 8 + len(text) + end


def write_headers(
    folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], shard_nbytes: int
) -> int:
    """Write a sharded checkpoint of headers and its index; return what it would weigh.

    A few kilobytes that describe a model of any size, for `Hub.add_names`.
    """
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    room = shard_nbytes
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * DTYPE_NBYTES[dtype]
        if nbytes > room and shards[-1]:
            shards.append({})
            room = shard_nbytes
        shards[-1][name] = (dtype, shape)
        room -= nbytes
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    total = sum(write_header(folder / n, shard) for n, shard in zip(names, shards, strict=True))
    weight_map = {t: n for n, shard in zip(names, shards, strict=True) for t in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


# --------------------------------------------------------------------------------------------------
# The ids that git itself would give to blobs and LFS pointers.
#
# Real ids, because they are what a client compares and calls its files by; a made-up one would let
# a wrong hash in our own code pass. Those of folders and commits are made up.


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


@dataclass(frozen=True)
class Commit:
    """The files of a repo at one moment."""

    id: str
    files: Mapping[str, Blob]
    folders: Mapping[str, str]  # folder -> an id; the root's name is empty


def commit_of(files: Mapping[str, Blob], title: str, parent: str | None) -> Commit:
    """Return a commit with an id that nothing else has, and the same in every run."""
    parents = {folder for path in files for folder in PurePosixPath(path).parents}
    names = {"" if folder == PurePosixPath() else str(folder) for folder in parents} | {""}
    folders = {name: git_id("tree", name.encode()) for name in names}
    listing = {path: blob.git_id for path, blob in sorted(files.items())}
    oid = git_id("commit", json.dumps([title, parent, listing]).encode())
    return Commit(oid, dict(files), folders)


# --------------------------------------------------------------------------------------------------
# A repo: commits, and the branches and tags that point at them.


Kind = Literal["model", "dataset"]


@dataclass
class Repository:
    """One repo of the Hub, and who may see it."""

    id: str
    kind: Kind = "model"
    private: bool = False
    gated: Literal[False, "auto", "manual"] = False
    readers: tuple[str, ...] = ()
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    discussions: list[dict[str, Any]] = field(default_factory=list)  # number = place + 1
    large: dict[str, Blob] = field(default_factory=dict)  # what LFS keeps, by sha256

    @property
    def key(self) -> str:
        """How the Hub's pages and `Hub.repos` call it."""
        return self.id if self.kind == "model" else f"datasets/{self.id}"

    @property
    def owner(self) -> str:
        return self.id.partition("/")[0]

    def commit(
        self,
        files: Mapping[str, Blob],
        title: str,
        *,
        parent: str | None = None,
        branch: str | None = "main",
    ) -> Commit:
        """Add a commit and move a branch there; without a `parent`, on top of its head."""
        parent = parent or (self.branches.get(branch) if branch else None)
        new = commit_of(files, title, parent)
        self.commits[new.id] = new
        self.large |= {blob.sha256: blob for blob in files.values() if blob.sha256}
        if branch:
            self.branches[branch] = new.id
        return new

    def resolve(self, revision: str) -> Commit | None:
        """Return the commit that a branch, a tag, a commit's id or the start of one names."""
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        if oid not in self.commits and re.fullmatch("[0-9a-f]{7,39}", revision):
            oid = next((known for known in self.commits if known.startswith(revision)), oid)
        return self.commits.get(oid)
