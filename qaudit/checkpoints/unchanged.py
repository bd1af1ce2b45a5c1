"""Weights that change while an audit reads them are refused.

Files are compared with the hashes of the plan as they are opened, which costs nothing where the
hash is remembered, and their stamps are compared again when they have been read. Weights in the
shared cache of the Hub are treated alike: other programs may write there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qaudit.checkpoints.places import folder_of
from qaudit.checkpoints.stamps import Stamp, content_read
from qaudit.errors import SourceError
from qaudit.types import Checkpoint, Subject


@dataclass(frozen=True)
class Opened:
    """The stamp of a file when it was opened, and its checkpoint."""

    stamp: Stamp | None
    checkpoint: Checkpoint


def stamps_of(
    subject: Subject, folder: Callable[[Checkpoint], Path] = folder_of
) -> dict[Path, Opened]:
    """Return the stamp of every weight file; refuse one that is not what was planned.

    Members of a running sum may be evicted already: each was checked when it was added.
    """
    opened: dict[Path, Opened] = {}
    for checkpoint, _ in subject.members:
        paths = {file.name: folder(checkpoint) / file.name for file in checkpoint.files}
        if checkpoint.commit is not None and not all(path.exists() for path in paths.values()):
            continue
        stamps = {path: Opened(_stamp(path), checkpoint) for path in paths.values()}
        if content_read(checkpoint, folder) != {f.name: f.sha256 for f in checkpoint.files}:
            raise _changed(checkpoint)
        opened |= stamps
    return opened


def must_be_unchanged(opened: Mapping[Path, Opened]) -> None:
    """Refuse files that are not as they were when they were opened."""
    for path, file in opened.items():
        if _stamp(path) != file.stamp:
            raise _changed(file.checkpoint)


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
