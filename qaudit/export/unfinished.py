"""Unfinished work beside a result: `.NAME.begun`, which the same command alone continues.

A file in it has the identity of the work. A folder of that name without it, or with links in it,
is refused and stays as it is: nothing is written to or removed from files of others.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qaudit.errors import UsageError, not_written
from qaudit.report.folder import must_be_outside
from qaudit.saved.parts import LOCK, WRITER, one_writer
from qaudit.whole import read_regular, write_whole

_MARKER = "qaudit-work"
_OWN_FILES = (LOCK, WRITER, _MARKER)
_RESULT = "result"


def must_be_new(out: Path) -> None:
    """Refuse a folder that holds something, or is inside a checkpoint."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"`{out}` exists already", hint="name a folder that does not exist yet")
    must_be_outside(out)


def begun_path(out: Path) -> Path:
    return out.with_name(f".{out.name}.begun")


@contextmanager
def begun_folder(out: Path, identity: str) -> Iterator[Path]:
    """Hold the folder of unfinished work; remove it once the block ends without an error.

    And where nothing can be resumed: what is refused is refused again.
    """
    folder = begun_path(out)
    _must_be_ours(folder, identity)
    with one_writer(folder):
        write_whole(folder / _MARKER, identity)
        try:
            yield folder
        except BaseException as error:
            if isinstance(error, UsageError) or _only_own_files(folder):
                _remove(folder)
            raise
        _remove(folder)


@contextmanager
def whole_folder(path: Path, begun: Path) -> Iterator[Path]:
    """Yield a new folder within unfinished work, which is moved to `path` once it is complete."""
    partial = begun / _RESULT
    try:
        if partial.exists():  # of a run that was killed
            shutil.rmtree(partial)
        partial.mkdir()
        yield partial
        if path.exists():
            path.rmdir()
        partial.replace(path)
    except OSError as error:
        raise not_written(path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _must_be_ours(folder: Path, identity: str) -> None:
    """Refuse a folder that is not of this very work, and links, before anything is written."""
    if folder.is_symlink():
        raise _foreign(folder, "is a link")
    if folder.exists() and not folder.is_dir():
        raise _foreign(folder, "is not a folder")
    if not folder.exists():
        return
    try:
        if any(path.is_symlink() for path in folder.rglob("*")):
            raise _foreign(folder, "has links in it")
        marker = folder / _MARKER
        if marker.exists():
            is_ours = read_regular(marker, 1000) == identity.encode()
        else:
            is_ours = _only_own_files(folder)
    except OSError as error:
        raise not_written(folder, error) from error
    if not is_ours:
        raise _foreign(folder, "holds something else")


def _only_own_files(folder: Path) -> bool:
    """Return whether a folder has no file but those that a killed process may begin with."""
    return all(path.name.startswith(_OWN_FILES) and path.is_file() for path in folder.iterdir())


def _foreign(folder: Path, reason: str) -> UsageError:
    return UsageError(
        f"unfinished work goes to `{folder}`, which {reason}",
        hint="remove it if nothing in it is needed and no other command writes it, or give "
        "another folder with `--out`",
    )


def _remove(folder: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(folder)
