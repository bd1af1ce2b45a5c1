"""Rows of diagnostics on disk, by a key over everything that changes them.

One JSON file for each subject and diagnostic, in `evidence/diagnostics/`. The name contains the
start of the key and the file all of it, so that rows of another version, text or machine are never
used. A file that cannot be read, or was edited, counts as absent. Rows have the label under which
they were first measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qaudit.checkpoints.places import own_cache
from qaudit.saved.codec import text_of
from qaudit.saved.hashes import read_recorded, write_recorded
from qaudit.saved.results import slug_of

FOLDER = "diagnostics"

Rows = list[dict[str, Any]]


class Stored(NamedTuple):
    """Rows and their file."""

    path: Path
    rows: Rows


def find(folder: Path, name: str, keys: Sequence[str]) -> Stored | None:
    """Return the rows under the first of the keys that has any, whatever their label."""
    for key in keys:
        for path in sorted(folder.glob(f"*--{name}--{key[:16]}.json")):
            if (rows := _read(path, key)) is not None:
                return Stored(path, rows)
    return None


def write(folder: Path, label: str, name: str, key: str, rows: Rows) -> None:
    """Write the rows of a subject atomically."""
    path = folder / f"{slug_of(label)}--{name}--{key[:16]}.json"
    write_recorded(path, text_of({"key": key, "rows": rows}), own_cache() / "evidence")


def _read(path: Path, key: str) -> Rows | None:
    try:
        document = read_recorded(path, own_cache() / "evidence")
        rows = document["rows"] if document["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return rows if isinstance(rows, list) else None
