"""Local folders and lists of names as repos, whose files have the ids that git would give.

    ROOT/<owner>/<name>/<revision>/...            a model
    ROOT/datasets/<owner>/<name>/<revision>/...   a dataset
    .../<name>/repo.json                          optional settings, see `SETTINGS`

Folders of revisions become commits of `main` in natural order, and each is a tag that is called
like the folder, or a branch if the settings say so. A folder `main` is what `main` ends at, under
no other name. A folder may escape what a file system forbids: `stage1%2Fstep5` is `stage1/step5`.

Ids of files are real, because they are what a client compares and calls its files by; a made-up one
would let a wrong hash in our own code pass. Those of folders and commits are made up.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

CHUNK_NBYTES = 256 * 1024
DTYPE_NBYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}
LFS_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf", ".npz"),
    *(".parquet", ".gz", ".zst"),
)
LFS_NBYTES = 10 * 1024 * 1024
ATTRIBUTES = "".join(f"*{s} filter=lfs diff=lfs merge=lfs -text\n" for s in LFS_SUFFIXES).encode()
SETTINGS = {
    "private": "bool",
    "gated": 'false, "auto" or "manual"',
    "readers": "users who may read although it is private or gated",
    "branch_per_revision": "bool: revisions are branches rather than tags",
    "main": "the revision where main points; null is a main with a README alone",
}


def git_id(kind, data):
    """Return the sha1 that git gives to an object."""
    return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(data)) + data).hexdigest()


def pointer(sha256, nbytes):
    """Return the text that git keeps in place of a large file."""
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {nbytes}\n"
    return text.encode()


def is_large(name, nbytes):
    """Say whether a file is kept by LFS rather than in git."""
    return name.endswith(LFS_SUFFIXES) or nbytes >= LFS_NBYTES


@dataclass(frozen=True)
class Blob:
    """Bytes, or a file as it is when it is read; known by its git id and, in LFS, by its sha256."""

    source: bytes | Path
    nbytes: int
    git_id: str = ""
    sha256: str | None = None

    @property
    def etag(self):
        """What the Hub names the content by: a client's cache calls the file that."""
        return self.sha256 or self.git_id

    def read(self, start, stop):
        """Yield the bytes from `start` to `stop` in pieces; what a file lacks is zero."""
        source = self.source
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
            file.seek(start)
            for position in range(start, stop, CHUNK_NBYTES):
                count = min(CHUNK_NBYTES, stop - position)
                yield file.read(count).ljust(count, b"\0")

    def whole(self):
        """Return every byte."""
        return b"".join(self.read(0, self.nbytes))

    def named(self, name, sha256=None):
        """Return the file with its ids; a `sha256` that is given is believed: nothing is read."""
        if not is_large(name, self.nbytes):
            return replace(self, git_id=git_id("blob", self.whole()))
        if sha256 is None:
            digest = hashlib.sha256()
            for piece in self.read(0, self.nbytes):
                digest.update(piece)
            sha256 = digest.hexdigest()
        return replace(self, git_id=git_id("blob", pointer(sha256, self.nbytes)), sha256=sha256)


def in_memory(name, data):
    """Return a file that is nowhere on disk."""
    return Blob(data, len(data)).named(name)


@lru_cache(maxsize=4096)
def _on_disk(path, nbytes, _changed, _inode):
    """Return a file on disk; what has not changed since is hashed once."""
    return Blob(path, nbytes).named(path.name)


@dataclass(frozen=True)
class Commit:
    """The files of a repo at one moment."""

    id: str
    files: Mapping[str, Blob]
    folders: Mapping[str, str]  # folder -> an id; the root's name is empty


@dataclass
class Repository:
    """One repo of the Hub, and who may see it."""

    id: str
    kind: str = "model"
    private: bool = False
    gated: bool | str = False  # or "auto", "manual"
    readers: tuple[str, ...] = ()
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    discussions: list[dict[str, Any]] = field(default_factory=list)  # number = place + 1
    large: dict[str, Blob] = field(default_factory=dict)  # what LFS keeps, by sha256

    def __post_init__(self):
        """Make the commit that every repo of the Hub begins with."""
        self.base = {".gitattributes": in_memory(".gitattributes", ATTRIBUTES)}
        self.first = self.commit(self.base, "initial commit").id

    @property
    def key(self):
        """How the Hub's pages and `Hub.repos` call it."""
        return self.id if self.kind == "model" else f"datasets/{self.id}"

    @property
    def owner(self):
        return self.id.partition("/")[0]

    def commit(self, files, title, *, parent=None, branch="main"):
        """Add a commit and move a branch there; without a `parent`, on top of its head.

        Its id is one that nothing else has, and the same in every run.
        """
        parent = parent or (self.branches.get(branch) if branch else None)
        parents = {folder for path in files for folder in PurePosixPath(path).parents}
        names = {"" if folder == PurePosixPath() else str(folder) for folder in parents} | {""}
        listing = {path: blob.git_id for path, blob in sorted(files.items())}
        oid = git_id("commit", json.dumps([title, parent, listing]).encode())
        folders = {name: git_id("tree", name.encode()) for name in names}
        new = self.commits[oid] = Commit(oid, dict(files), folders)
        self.large |= {blob.sha256: blob for blob in files.values() if blob.sha256}
        if branch:
            self.branches[branch] = oid
        return new

    def resolve(self, revision):
        """Return the commit that a branch, a tag, a commit's id or the start of one names."""
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        if re.fullmatch("[0-9a-f]{7,39}", oid):
            oid = next((known for known in self.commits if known.startswith(oid)), oid)
        return self.commits.get(oid)

    def point_main(self, revision):
        """Move main to a revision, or to a README alone."""
        if revision is not None:
            self.branches["main"] = self.branches.get(revision) or self.tags[revision]
            return
        readme = in_memory("README.md", f"# {self.id}\n\nSee the revisions.\n".encode())
        self.commit(self.base | {"README.md": readme}, "Say what it is", parent=self.first)


def repositories_in(root):
    """Yield every repo below a folder."""
    kinds = {"model": root, "dataset": root / "datasets"}
    for kind, place in kinds.items():
        for owner in _folders(place):
            if (owner.name, kind) != ("datasets", "model"):
                for path in _folders(owner):
                    yield _repository_of(path, Repository(f"{owner.name}/{path.name}", kind))


def _folders(path):
    """Return the folders in one, numbers in their names sorted as numbers."""

    def natural(folder):
        parts = re.split(r"(\d+)", folder.name)
        return [(int(part or 0), "") if part.isdigit() else (0, part) for part in parts]

    return sorted((p for p in path.glob("*") if p.is_dir()), key=natural)


def _repository_of(folder, repo):
    """Return the repo that a folder describes."""
    path = folder / "repo.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    if unknown := set(settings) - set(SETTINGS):
        raise ValueError(f"{path}: unknown keys {sorted(unknown)}; there are {sorted(SETTINGS)}")
    named = repo.branches if settings.pop("branch_per_revision", False) else repo.tags
    ids = dict[str, str]()
    for path in sorted(_folders(folder), key=lambda p: p.name == "main"):
        name = unquote(path.name)
        ids[name] = repo.commit(repo.base | _files_in(path), f"checkpoint {name}").id
    named |= {name: oid for name, oid in ids.items() if name != "main"}
    if "main" in settings:
        repo.point_main(settings.pop("main"))
    for name, value in settings.items():
        setattr(repo, name, value)
    return repo


def _files_in(folder):
    """Return the files below a folder by their paths there."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            is_ = path.stat()
            blob = _on_disk(path, is_.st_size, is_.st_mtime_ns, is_.st_ino)
            files[path.relative_to(folder).as_posix()] = blob
    return files


# ---------------------------------------------- many names, one folder


def with_names(id_, names, folder, main=None, aliases=None, pretend_nbytes=None):
    """Return a repo with a branch per name, each with its own commit; see `Hub.add_names`."""
    repo = Repository(id_)
    shared = repo.base | _files_in(folder)
    weights = {path: blob for path, blob in shared.items() if path.endswith(".safetensors")}

    def add(name, files):
        branch = repo.commit(files, f"checkpoint {name}", parent=repo.first, branch=None)
        repo.branches[name] = branch.id

    for name in names:
        own = {}
        for path, blob in weights.items():
            assert isinstance(blob.source, Path)
            claimed = Blob(blob.source, pretend_nbytes or described_nbytes(blob.source))
            made_up = hashlib.sha256(f"{repo.key}@{name}/{path}".encode()).hexdigest()
            own[path] = claimed.named(path, made_up)
        add(name, shared | own)
    for name, other in (aliases or {}).items():
        add(name, repo.commits[repo.branches[other]].files)
    repo.point_main(main)
    return repo


def described_nbytes(path):
    """Return how long a safetensors file is by its header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return int(8 + length + max(ends, default=0))


def _write_header(path, tensors):
    """Write a safetensors file that ends behind its header; return what it would be long."""
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPE_NBYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return 8 + len(text) + end


def write_headers(folder, tensors, shard_nbytes):
    """Write a sharded checkpoint of headers and its index; return what it would weigh.

    A few kilobytes that describe a model of any size, for `Hub.add_names`.
    """
    shards = [{}]
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
    total = sum(_write_header(folder / n, shard) for n, shard in zip(names, shards, strict=True))
    weight_map = {t: n for n, shard in zip(names, shards, strict=True) for t in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total
