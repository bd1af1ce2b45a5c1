"""Small files that are there whole or not at all, and regular files alone.

A file is written beside its place under a name that no other process has, flushed to the disk and
moved there: a reader sees the old file or the new one. Devices and FIFOs are neither replaced nor
waited for. Large files (weights, evidence, downloads) have ways of their own, because they are
resumed.
"""

from __future__ import annotations

import errno
import io
import json
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qaudit.errors import not_written

LARGEST_NBYTES = 1 << 29
"""Of a file that is read at once; tokenizers have tens of megabytes."""

STALE_SECONDS = 3600
"""Far longer than writing a small file takes, and than clocks of hosts differ."""
_PARTIAL = re.compile(r"\.[A-Za-z0-9-]*-[0-9a-f]{16}\.partial$")
"""The end of what `partial_name` returns."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that one process at a time can hold; the system drops it with the process."""
    import fcntl  # Windows has none, and needs no lock to read an audit

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a name to write a file under, which then takes its place; refuse what is no file."""
    partial = partial_name(path)
    try:
        with suppress(FileNotFoundError):  # a loop of links is no new name
            if not stat.S_ISREG(path.stat().st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, UnicodeEncodeError) as error:
        raise not_written(path, error) from error
    finally:  # an interrupt leaves no partial file either
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write text or bytes unchanged, to a regular file or a new name."""
    with whole_file(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def copy_whole(source: Path, path: Path) -> None:
    with whole_file(path) as partial:
        shutil.copyfile(source, partial)


def partial_name(path: Path) -> Path:
    """Return a new name to write a file under, in its folder.

    Process numbers are no names there: other hosts and containers on the same folder have equal
    ones. So the name has a random part, and the host for people to read.
    """
    host = re.sub(r"[^A-Za-z0-9-]+", "-", platform.node())[:40]
    return path.with_suffix(f".{host}-{secrets.token_hex(8)}.partial")


def remove_stale(folder: Path) -> None:
    """Remove half-written files, by their names ours, that nothing was written to for an hour."""
    for path in folder.glob("*.partial"):
        with suppress(OSError):
            status = path.lstat()
            is_ours = stat.S_ISREG(status.st_mode) and _PARTIAL.search(path.name)
            if is_ours and time.time() - status.st_mtime > STALE_SECONDS:
                path.unlink()


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading; OSError for anything else."""
    # A FIFO without a writer would block an ordinary open for ever.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return io.BufferedReader(io.FileIO(descriptor))


def read_regular(path: Path, most_nbytes: int = LARGEST_NBYTES) -> bytes:
    """Read a regular file of at most so many bytes; OSError for anything else."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most_nbytes:
            raise OSError(errno.EFBIG, f"larger than {most_nbytes:,} bytes", str(path))
        return file.read(most_nbytes)


def read_table(path: Path, most_nbytes: int = LARGEST_NBYTES) -> dict[str, Any]:
    """Return a table of JSON; empty where it cannot be read, which a later read refuses."""
    try:
        table = json.loads(read_regular(path, most_nbytes).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}
