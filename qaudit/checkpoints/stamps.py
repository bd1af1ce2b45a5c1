"""Hashes of files, remembered until the file changes.

Hashing a series of 7B checkpoints takes minutes, and every scan needs the hashes before it can
name what was measured. A hash is stored together with the file's stamp: size, times of
modification and change, and inode. The time of change is part of it because a program can
reset the time of modification and cannot reset that one. A file that changed within the last two
seconds is hashed and not remembered: it could change again within the same tick of the clock.

One small file per hashed file, renamed into place, so that several processes may share the
folder without a lock. What cannot be written or read there is hashed again: this is a memory,
never a source of truth. Given up: a machine whose clock is set back can fool it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from qaudit.checkpoints.places import own_cache, own_folder
from qaudit.errors import MachineError
from qaudit.types import Checkpoint, digest
from qaudit.whole import open_regular, read_regular, write_whole

HashKind = Literal["sha256", "git"]

SETTLED_NS = 2_000_000_000
"""How long a file must have been left alone before its stamp is trusted."""

_PIECE = 1 << 20


@dataclass(frozen=True)
class Stamp:
    """Size, times and inode of a file: one of them changes when the file does.

    The number of the device is left out: each mount of a network share has its own.
    """

    nbytes: int
    modified_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        return cls._of(path.stat())

    @classmethod
    def of_link(cls, path: Path) -> Stamp:
        """Read the stamp of a file, and of the link itself if it is one."""
        return cls._of(path.lstat())

    @classmethod
    def _of(cls, stat: os.stat_result) -> Stamp:
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def hash_of(
    path: Path, kind: HashKind = "sha256", *, now_ns: Callable[[], int] = time.time_ns
) -> str:
    """Return the hash of a file's bytes, from memory where the file has not changed since."""
    stamp = Stamp.of(path)
    recorded = known_hash(path, kind)
    if recorded is not None:
        return recorded
    computed = computed_hash(path, kind)
    remember(path, stamp, computed, kind, now_ns=now_ns)
    return computed


def remember(
    path: Path,
    stamp: Stamp,
    file_hash: str,
    kind: HashKind = "sha256",
    *,
    now_ns: Callable[[], int] = time.time_ns,
) -> None:
    """Store the hash of a file that had this stamp before it was read, unless in doubt."""
    if Stamp.of(path) == stamp and now_ns() - stamp.changed_ns > SETTLED_NS:
        _store(path, stamp, kind, file_hash)


def remember_written(path: Path, file_hash: str, kind: HashKind = "sha256") -> None:
    """Store the hash of a file that this process has just written under a lock."""
    _store(path, Stamp.of(path), kind, file_hash)


def known_hash(path: Path, kind: HashKind = "sha256") -> str | None:
    """Return the hash that is remembered for a file as it is now, without reading it."""
    try:
        record = json.loads(read_regular(_place(path, kind)).decode())
        if record["stamp"] == asdict(Stamp.of(path)):
            return str(record["hash"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def computed_hash(path: Path, kind: HashKind = "sha256") -> str:
    """Read a file and return its hash; git's is that of its bytes behind a line with their count.

    Only git's own ids are compared with it: nothing is trusted to SHA-1 that has a sha256.
    """
    with open_regular(path) as file:
        if kind == "sha256":
            return hashlib.file_digest(file, "sha256").hexdigest()
        head = b"blob %d\0" % os.fstat(file.fileno()).st_size
        git_hash = hashlib.sha1(head, usedforsecurity=False)
        while piece := file.read(_PIECE):
            git_hash.update(piece)
        return git_hash.hexdigest()


def content_read(
    checkpoint: Checkpoint, folder: Callable[[Checkpoint], Path] = own_folder
) -> dict[str, str]:
    """Return the identity of every weight file as it is on the disk now, by file name.

    A file is read again only where its stamp is not the one its hash was stored with. A file
    that cannot be read has no entry.
    """
    hashes = {}
    for file in checkpoint.files:
        path = folder(checkpoint) / file.name
        with suppress(OSError):
            if file.sha256.startswith("git:"):
                hashes[file.name] = f"git:{hash_of(path, 'git')}"
            else:
                hashes[file.name] = hash_of(path)
    return hashes


def _store(path: Path, stamp: Stamp, kind: HashKind, file_hash: str) -> None:
    record = {"path": str(path), "stamp": asdict(stamp), "hash": file_hash}
    with suppress(MachineError):
        write_whole(_place(path, kind), json.dumps(record))


def _place(path: Path, kind: HashKind) -> Path:
    return own_cache() / "stamps" / f"{digest([str(path.resolve()), kind])}.json"
