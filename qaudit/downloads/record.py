"""The contents that a scan with a disk budget downloaded and has not evicted yet.

A budget is for what a scan adds to the disk. A scan that is killed leaves weights behind; the
next one has to count and evict them, and must not evict what was there before. So contents are
recorded beside the results before their first byte comes, and removed once they are evicted.
"""

from __future__ import annotations

import json
from pathlib import Path

from qaudit.errors import not_written
from qaudit.whole import write_whole

RECORD_FILE = "fetched.json"
"""The name of the record in an output folder."""


class EvictionRecord:
    """A list of contents in one file, which is there as long as the list is not empty."""

    def __init__(self, path: Path | None) -> None:
        """Read what an earlier scan left; without a path nothing is known or recorded."""
        self._path = path
        self._contents = _read(path) if path else frozenset[str]()

    def __contains__(self, content: str) -> bool:
        """Return whether a content was downloaded and is not evicted yet."""
        return content in self._contents

    def add(self, content: str) -> None:
        """Record a content whose download begins."""
        self._set(self._contents | {content})

    def remove(self, content: str) -> None:
        """Remove a content that was evicted."""
        self._set(self._contents - {content})

    def _set(self, contents: frozenset[str]) -> None:
        if self._path is None or contents == self._contents:
            return
        self._contents = contents
        if contents:
            write_whole(self._path, json.dumps(sorted(contents), indent=1))
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise not_written(self._path, error) from error


def _read(path: Path) -> frozenset[str]:
    """Read a list; of a damaged one nothing is evicted."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return frozenset()
    return frozenset(map(str, contents)) if isinstance(contents, list) else frozenset()
