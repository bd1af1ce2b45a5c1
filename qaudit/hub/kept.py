"""What was learned of the Hub and is kept on disk: one small JSON file for each thing.

The names of the files are digests, so that no name from the network is ever a path; the thing
itself is written inside and compared when it is read, so that a file copied to another place
says nothing. A file is written beside its place and moved there, and one that is damaged, or
of another version, is as good as absent: everything here can be asked again. So can what the
disk does not take, and then it is said once and the work goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Any

from qaudit.types import digest

VERSION = 1


class Kept:
    """A folder of things by their keys."""

    def __init__(self, folder: Path, say: Callable[[str], object]) -> None:
        """Use `folder`, which is made when something is kept."""
        self._folder, self._say = folder, say
        self._told = False

    def path(self, shelf: str, key: Sequence[str]) -> Path:
        """Return where a thing is kept, or would be."""
        return self._folder / f"v{VERSION}" / shelf / f"{digest([shelf, *key])}.json"

    def find(self, shelf: str, key: Sequence[str]) -> Any:
        """Return what is kept under a key, or None."""
        try:
            text = self.path(shelf, key).read_text(encoding="utf-8")
            record = json.loads(text)
        except (OSError, ValueError, RecursionError):
            return None
        whole = isinstance(record, dict) and record.get("key") == [shelf, *key]
        return record.get("value") if whole else None

    def keep(self, shelf: str, key: Sequence[str], value: Any) -> None:
        """Write a thing so that it is there whole or not at all."""
        path = self.path(shelf, key)
        partial = path.with_suffix(f".{os.getpid()}.{get_ident()}.partial")
        text = json.dumps({"key": [shelf, *key], "value": value}, separators=(",", ":"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            self._tell(error)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            why = (error.strerror or str(error)).lower()
            self._say(f"what the Hub tells cannot be kept in `{self._folder}`: {why}")
        self._told = True
