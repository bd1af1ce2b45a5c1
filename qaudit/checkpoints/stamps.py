"""Hashes of files, remembered until the file changes; changed files of a plan are refused.

Hashing a series of 7B checkpoints takes minutes, and every scan needs the hashes before it can
name what was measured. A hash is stored together with the file's stamp: size, times of
modification and change, and inode. The time of change is part of it because a program can
reset the time of modification and cannot reset that one. A file that changed within the last two
seconds is hashed and not remembered: it could change again within the same tick of the clock.

One small file per hashed file, renamed into place, so that several processes may share the
folder without a lock. What cannot be written or read there is hashed again: this is a memory,
never a source of truth. Given up: a machine whose clock is set back can fool it.

Hashes are compared with those of the plan when files are opened, which costs nothing where
the hash is remembered, and their stamps when they have been read. Those in the shared cache of
the Hub are treated alike, because other programs may write there.

Of the small files beside weights those are in the plan that decide numbers: configuration, index,
tokenizer, quantization. Which of them a folder has is pinned, too: an `added_tokens.json` that was
not there when the plan was made changes the tokens.

The places of files ask no network and no library of the Hub. A Hub checkpoint is in the standard
cache that every Hugging Face tool shares, under the commit it was resolved to; the folder is where
it will be even before it is fetched. The rules for finding the cache are the client's own, repeated
here because importing the client takes longer than planning a local audit; a test compares the two.

"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from qaudit.errors import MachineError, SourceError
from qaudit.types import Checkpoint, Subject, TextFile, WeightFile, digest
from qaudit.whole import open_regular, read_regular, read_table, write_whole


def hub_cache() -> Path:
    """Return the cache that Hugging Face tools share."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if cache:
        return _expanded(cache)
    home = os.environ.get("HF_HOME") or f"{_user_cache()}/huggingface"
    return _expanded(home) / "hub"


def own_cache() -> Path:
    return _expanded(os.environ.get("QAUDIT_CACHE") or f"{_user_cache()}/qaudit")


def _user_cache() -> str:
    return os.environ.get("XDG_CACHE_HOME") or "~/.cache"


def _expanded(path: str) -> Path:
    """Return a path of the environment with its `~` and its `$NAME` filled in, in that order."""
    return Path(os.path.expandvars(Path(path).expanduser()))


def repo_folder(repo: str, kind: str = "model") -> Path:
    """Return the folder of a repository in the shared cache; `kind` is model or dataset."""
    return hub_cache() / f"{kind}s--{repo.replace('/', '--')}"


def snapshot(repo: str, commit: str, kind: str = "model") -> Path:
    return repo_folder(repo, kind) / "snapshots" / commit


def folder_of(checkpoint: Checkpoint) -> Path:
    """Return the folder of a checkpoint's configuration, which exists once it is fetched."""
    return own_folder(checkpoint.base or checkpoint)


def own_folder(checkpoint: Checkpoint) -> Path:
    """Return the folder of a checkpoint's own weights, which exists once they are fetched."""
    ref = checkpoint.ref
    base = snapshot(ref.location, checkpoint.commit) if checkpoint.commit else Path(ref.location)
    return base / ref.subfolder if ref.subfolder else base


def is_gguf(place: PurePath | str) -> bool:
    return str(place).lower().endswith(".gguf")


def weights_of(checkpoint: Checkpoint, folder: Path) -> Path:
    """Return the place of weights: a folder, or the one GGUF file of a checkpoint."""
    names = [file.name for file in checkpoint.files]
    return folder / names[0] if len(names) == 1 and is_gguf(names[0]) else folder


def text_path(text: TextFile) -> Path:
    """Return the path of a text of the Hub, which exists once it is fetched."""
    return snapshot(text.repo, text.commit, "dataset") / text.path


HashKind = Literal["sha256", "git"]

SETTLED_NS = 2_000_000_000
"""How long a file must have been left alone before its stamp is trusted."""


class Stamp(NamedTuple):
    """Size, times and inode of a file: one of them changes when the file does.

    The number of the device is left out: each mount of a network share has its own.
    """

    nbytes: int
    modified_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, *, follow_symlinks: bool = True) -> Stamp:
        """Read the stamp of a file, or of the link itself if it is one."""
        stat = path.stat(follow_symlinks=follow_symlinks)
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def hash_of(path: Path, kind: HashKind = "sha256") -> str:
    """Return the hash of a file's bytes, from memory where the file has not changed since."""
    stamp = Stamp.of(path)
    recorded = known_hash(path, kind)
    if recorded is not None:
        return recorded
    computed = computed_hash(path, kind)
    remember(path, stamp, computed, kind)
    return computed


def remember(path: Path, stamp: Stamp, file_hash: str, kind: HashKind = "sha256") -> None:
    """Store the hash of a file that had this stamp before it was read, unless in doubt."""
    if Stamp.of(path) == stamp and time.time_ns() - stamp.changed_ns > SETTLED_NS:
        _store(path, stamp, kind, file_hash)


def remember_written(path: Path, file_hash: str, kind: HashKind = "sha256") -> None:
    """Store the hash of a file that this process has just written under a lock."""
    _store(path, Stamp.of(path), kind, file_hash)


def known_hash(path: Path, kind: HashKind = "sha256") -> str | None:
    """Return the hash that is remembered for a file as it is now, without reading it."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(read_regular(_place(path, kind)).decode())
        if record["stamp"] == Stamp.of(path)._asdict():
            return str(record["hash"])
    return None


def computed_hash(path: Path, kind: HashKind = "sha256") -> str:
    """Read a file and return its hash; git's is that of its bytes behind a line with their count.

    Only git's own ids are compared with it: nothing is trusted to SHA-1 that has a sha256.
    """
    with open_regular(path) as file:
        if kind == "sha256":
            return hashlib.file_digest(file, "sha256").hexdigest()
        head = b"blob %d\0" % os.fstat(file.fileno()).st_size
        by_git = partial(hashlib.sha1, head, usedforsecurity=False)
        return hashlib.file_digest(file, by_git).hexdigest()


def content_read(
    checkpoint: Checkpoint, folder: Callable[[Checkpoint], Path] = own_folder
) -> dict[str, str]:
    """Return the identity of every weight file as it is on the disk now, by file name.

    A file is read again only where its stamp is not the one its hash was stored with. A file
    that cannot be read has no entry.
    """
    where = folder(checkpoint)
    hashes = {f.name: _as_planned(where / f.name, f.sha256) for f in checkpoint.files}
    return {name: sha256 for name, sha256 in hashes.items() if sha256}


def _store(path: Path, stamp: Stamp, kind: HashKind, file_hash: str) -> None:
    record = {"path": str(path), "stamp": stamp._asdict(), "hash": file_hash}
    with suppress(MachineError):
        write_whole(_place(path, kind), json.dumps(record))


def _place(path: Path, kind: HashKind) -> Path:
    return own_cache() / "stamps" / f"{digest([str(path.resolve()), kind])}.json"


CONFIGURATION = "config.json"
QUANTIZATION = ("quantize_config.json", "quant_config.json")  # of older quantized repositories
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model",  # sentencepiece
    "chat_template*", "additional_chat_templates/*.jinja",
)  # fmt: skip
LARGEST_SETTINGS_NBYTES = 100_000_000
"""A larger file is no setting, whatever its name."""

_PINNED = (CONFIGURATION, *QUANTIZATION, *INDEXES, *TOKENIZER)


def settings_in(folder: Path) -> tuple[WeightFile, ...]:
    """Return the small files of a folder with their hashes; one that cannot be read is left out."""
    pinned, paths = [], [*folder.glob("additional_chat_templates/*.jinja")]
    with suppress(OSError):
        paths += [p for p in folder.iterdir() if any(fnmatchcase(p.name, n) for n in _PINNED)]
    tables = (folder / CONFIGURATION, folder / "tokenizer_config.json")
    if any("auto_map" in read_table(path, LARGEST_SETTINGS_NBYTES) for path in tables):
        paths += folder.rglob("*.py")
    for path in sorted(paths):
        with suppress(OSError):
            nbytes = path.stat().st_size
            if path.is_file() and nbytes < LARGEST_SETTINGS_NBYTES:
                name = path.relative_to(folder).as_posix()
                pinned.append(WeightFile(name, nbytes, hash_of(path)))
    return tuple(pinned)


def refuse_changed_settings(checkpoint: Checkpoint) -> None:
    """Raise for the first small file that is not as it was planned.

    Of a checkpoint on the Hub, files of other tools may be beside those of its commit.
    """
    if not checkpoint.settings:
        return
    folder, owner = folder_of(checkpoint), checkpoint.base or checkpoint
    planned = {file.name: file.sha256 for file in checkpoint.settings}
    if owner.commit is None:
        now = {file.name: file.sha256 for file in settings_in(folder)}
    else:
        now = {name: _as_planned(folder / name, sha256) for name, sha256 in planned.items()}
    for name in sorted(planned.keys() | now.keys()):
        if planned.get(name) != now.get(name):
            change = "was added" if name not in planned else "has changed"
            raise SourceError(
                f"`{name}` of `{checkpoint.label}` {change if name in now else 'was removed'} "
                "since the audit was planned",
                hint=f"restore `{folder / name}`, or plan again to measure what is there now",
            )


def _as_planned(path: Path, planned: str, hashed: Callable[[Path, HashKind], str] = hash_of) -> str:
    """Return the hash of a file as its plan writes it: sha256, or the id of git."""
    with suppress(OSError):
        if planned.startswith("git:"):
            return f"git:{hashed(path, 'git')}"
        return hashed(path, "sha256")
    return ""


def has_hash(path: Path, planned: str | None) -> bool:
    """Return whether the bytes of a file, which are read again, have the hash of a plan."""
    return bool(planned) and _as_planned(path, str(planned), computed_hash) == planned


@contextmanager
def unchanged_files(
    subject: Subject, folder: Callable[[Checkpoint], Path] = own_folder
) -> Iterator[dict[str, str]]:
    """Refuse files that are not those of the plan, when they are opened and after the block.

    Yields the hash of every file, by label and name.
    """
    hashes: dict[str, str] = {}
    opened: list[tuple[Path, Stamp | None, Checkpoint]] = []
    members = [checkpoint for checkpoint, _ in subject.members]
    bases = {c.base.content: c.base for c in members if c.base is not None and c.is_adapter}
    for checkpoint in (*members, *bases.values()):
        planned = {file.name: file.sha256 for file in checkpoint.files}
        read = planned | {file.name: file.sha256 for file in checkpoint.settings}
        hashes |= {f"{checkpoint.label}/{name}": sha256 for name, sha256 in read.items()}
        refuse_changed_settings(checkpoint)
        paths = [folder(checkpoint) / name for name in planned]
        opened += [(path, _stamp(path), checkpoint) for path in paths]
        if content_read(checkpoint, folder) != planned:
            raise _changed(checkpoint)
    yield hashes
    for checkpoint in members:
        refuse_changed_settings(checkpoint)
    for path, stamp, checkpoint in opened:
        if _stamp(path) != stamp:
            raise _changed(checkpoint)


def _stamp(path: Path) -> Stamp | None:
    with suppress(OSError):
        return Stamp.of(path)
    return None


def _changed(checkpoint: Checkpoint) -> SourceError:
    return SourceError(
        f"the weights of `{checkpoint.label}` have changed since the audit was planned",
        hint="run the same command again when nothing writes there any more",
    )
