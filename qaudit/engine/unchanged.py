"""Weights in folders of this machine, which may change under the eyes of an audit.

A number under the wrong name is worse than none. So files are held against the hashes of the
plan as they are opened, which costs nothing where the hash is remembered, and their stamps are
compared once more when they have been read. What comes from the Hub is checked where it is
fetched, and lies in a cache that nobody writes to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qaudit.checkpoints.places import folder_of
from qaudit.checkpoints.stamps import Stamp, hash_of
from qaudit.errors import SourceError
from qaudit.types import Checkpoint, Subject


@dataclass(frozen=True)
class Opened:
    """A file as it was when it was opened, and whose it is."""

    stamp: Stamp | None
    checkpoint: Checkpoint


def stamps_of(subject: Subject) -> dict[Path, Opened]:
    """Return every file of weights as it is now; refuse one that is not what was planned."""
    found = {}
    for checkpoint, _ in subject.members:
        if checkpoint.commit is None:
            for file in checkpoint.files:
                path = folder_of(checkpoint) / file.name
                found[path] = Opened(_stamp(path), checkpoint)
                if _hash(path) != file.sha256:
                    raise _changed(checkpoint)
    return found


def must_be_unchanged(opened: Mapping[Path, Opened]) -> None:
    """Refuse files that are not as they were when they were opened."""
    for path, file in opened.items():
        if _stamp(path) != file.stamp:
            raise _changed(file.checkpoint)


def _hash(path: Path) -> str | None:
    try:
        return hash_of(path)
    except OSError:
        return None


def _stamp(path: Path) -> Stamp | None:
    try:
        return Stamp.of(path)
    except OSError:
        return None


def _changed(checkpoint: Checkpoint) -> SourceError:
    return SourceError(
        f"the weights of `{checkpoint.label}` have changed since the audit was planned",
        hint="run the same command again when nothing writes there any more",
    )
