"""Refuse files that are not those of the plan, or that change while an audit reads them.

Their hashes are compared with those of the plan when they are opened, which costs nothing where
the hash is remembered, and their stamps when they have been read. Those in the shared cache of
the Hub are treated alike, because other programs may write there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qaudit.checkpoints.places import folder_of
from qaudit.checkpoints.settings import settings_in
from qaudit.checkpoints.stamps import Stamp, content_read, hash_of
from qaudit.errors import SourceError
from qaudit.types import Checkpoint, Subject


def refuse_changed_settings(checkpoint: Checkpoint) -> None:
    """Raise for the first small file that is not as it was planned; old plans pinned none.

    Of a checkpoint on the Hub, files of other tools may be beside those of its commit.
    """
    if not checkpoint.settings:
        return
    folder = folder_of(checkpoint)
    planned = {file.name: file.sha256 for file in checkpoint.settings}
    if checkpoint.commit is None:
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


def _as_planned(path: Path, planned: str) -> str:
    """Return the hash of a file as its plan writes it."""
    with suppress(OSError):
        if planned.startswith("git:"):
            return f"git:{hash_of(path, 'git')}"
        return hash_of(path)
    return ""


@contextmanager
def unchanged_files(
    subject: Subject, folder: Callable[[Checkpoint], Path] = folder_of
) -> Iterator[dict[str, str]]:
    """Refuse files that are not those of the plan, when they are opened and after the block.

    Yields the hash of every file, by label and name.
    """
    hashes: dict[str, str] = {}
    opened: list[tuple[Path, Stamp | None, Checkpoint]] = []
    for checkpoint, _ in subject.members:
        planned = {file.name: file.sha256 for file in checkpoint.files}
        read = planned | {file.name: file.sha256 for file in checkpoint.settings}
        hashes |= {f"{checkpoint.label}/{name}": sha256 for name, sha256 in read.items()}
        refuse_changed_settings(checkpoint)
        paths = [folder(checkpoint) / name for name in planned]
        opened += [(path, _stamp(path), checkpoint) for path in paths]
        if content_read(checkpoint, folder) != planned:
            raise _changed(checkpoint)
    yield hashes
    for checkpoint, _ in subject.members:
        refuse_changed_settings(checkpoint)
    for path, stamp, checkpoint in opened:
        if _stamp(path) != stamp:
            raise _changed(checkpoint)


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
