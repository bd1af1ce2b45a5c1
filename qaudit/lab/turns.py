"""One process at a time: whoever comes second waits, and then finds what the first has made.

The system holds the lock and drops it with the process, however that ends.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Wait until no other process holds this lock, and hold it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
