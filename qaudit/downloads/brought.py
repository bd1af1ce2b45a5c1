"""What an audit put on the disk and has not taken away: what a resumed one may evict.

A disk budget is for what a scan adds. A scan that is killed leaves weights behind, and the next
one has to count and evict them, or every kill would add another budget; but it must not evict
what lay there before, whoever put it there. So the contents that a scan with a budget brings
are written down beside its results before their first byte comes, and struck out once they are
gone. Nothing is written down where there is no budget, because nothing is evicted then.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from qaudit.errors import not_written

RECORD_FILE = "fetched.json"
"""Where the list lies in an output folder."""


class Brought:
    """A list of contents in one file, which is there as long as the list is not empty."""

    def __init__(self, path: Path | None) -> None:
        """Read what an earlier scan left; without a path nothing is known or kept."""
        self._path = path
        self._contents = _read(path) if path else frozenset[str]()

    def __contains__(self, content: str) -> bool:
        """Say whether this audit brought a content that is not evicted yet."""
        return content in self._contents

    def add(self, content: str) -> None:
        """Write down that a content begins to come."""
        self._set(self._contents | {content})

    def remove(self, content: str) -> None:
        """Strike out a content that is gone."""
        self._set(self._contents - {content})

    def _set(self, contents: frozenset[str]) -> None:
        if self._path is None or contents == self._contents:
            return
        self._contents = contents
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        try:
            if not contents:
                self._path.unlink(missing_ok=True)
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(sorted(contents), indent=1), encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            raise not_written(self._path, error) from error


def _read(path: Path) -> frozenset[str]:
    """Read a list; one that is damaged is none, and what it named is then let alone."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(map(str, kept)) if isinstance(kept, list) else frozenset()
