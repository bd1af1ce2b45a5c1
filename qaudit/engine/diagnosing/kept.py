"""What diagnostics found, on disk by the content of everything that changes it.

One JSON file for each subject and diagnostic, in `evidence/diagnostics/`. Its name carries the
start of its key and the file the whole key, so that what another version, text or machine found
is never taken for it; a file that does not open is as good as absent. A row is kept as it will
stand in the audit, under the label of whoever was first to have these weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qaudit.saved.results import slug_of
from qaudit.saved.rows import text_of
from qaudit.whole import write_whole

FOLDER = "diagnostics"

Rows = list[dict[str, Any]]


def path_of(folder: Path, label: str, name: str, key: str) -> Path:
    """Return where the rows of a subject lie: a name for people and a key for us."""
    return folder / f"{slug_of(label)}--{name}--{key[:16]}.json"


class Kept(NamedTuple):
    """Rows and the file they lie in."""

    path: Path
    rows: Rows


def find(folder: Path, name: str, keys: Sequence[str]) -> Kept | None:
    """Return the rows under the first of the keys that there are any for, whatever their label."""
    for key in keys:
        for path in sorted(folder.glob(f"*--{name}--{key[:16]}.json")):
            if (rows := _read(path, key)) is not None:
                return Kept(path, rows)
    return None


def keep(path: Path, key: str, rows: Rows) -> None:
    """Write rows so that they are there whole or not at all."""
    write_whole(path, text_of({"key": key, "rows": rows}))


def _read(path: Path, key: str) -> Rows | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = document["rows"] if document["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return rows if isinstance(rows, list) else None
