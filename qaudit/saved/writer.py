"""One writer for each output folder: two scans into one folder would mix their files.

The lock is the operating system's: it ends with the process, however that ends.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qaudit.errors import MachineError, not_written
from qaudit.host import NO_LOCKS
from qaudit.whole import read_regular, write_whole

LOCK, WRITER = ".qaudit.lock", ".qaudit.writer"


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold an output folder; MachineError names the process that holds it already."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
    writer = json.dumps({"pid": os.getpid(), "host": platform.node()})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        write_whole(folder / WRITER, writer)  # in place of a link, not through it
    except Timeout as error:
        raise MachineError(
            f"`{folder}` is being written by {_writer(folder)}",
            hint="wait until it ends, or name another folder with `--out`",
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise not_written(folder, error) from error
        yield  # without a lock
        return
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / WRITER).unlink()
        lock.release()


def _writer(folder: Path) -> str:
    try:
        writer = json.loads(read_regular(folder / WRITER, 1000))
        return f"process {int(writer['pid'])} on {json.dumps(str(writer['host']))[1:-1]}"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"
