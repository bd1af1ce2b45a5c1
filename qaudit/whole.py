"""Small files that are there whole or not at all, however the process ends.

Written beside their place under a name of this process, brought to the disk and moved there: who
reads sees the old file or the new one. Large files (weights, evidence, downloads) have ways of
their own, because they go on from where they were.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from qaudit.errors import not_written


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file by a text, whose line ends stay as they are, or by bytes."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise not_written(path, error) from error
    finally:  # an interrupt leaves nothing behind either
        with suppress(OSError):
            partial.unlink(missing_ok=True)
