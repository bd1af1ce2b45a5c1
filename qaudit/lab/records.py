"""What the runs of a folder are: `OUT/states/RUN.json`, for people and for the family's file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qaudit.errors import SourceError
from qaudit.lab.run import Run, run_of
from qaudit.whole import write_whole

FOLDER = "states"
"""Where records and states lie; it holds no checkpoint, so that a scan passes it by."""


def write_record(out: Path, run: Run, text_key: str, environment: Mapping[str, Any]) -> None:
    """Write what a run is, for people and for the family's file."""
    record = {
        "run": run.table(),
        "key": run.key,
        "text": text_key,
        "environment": dict(environment),
    }
    write_whole(out / FOLDER / f"{run.name}.json", json.dumps(record, indent=1) + "\n")


def runs_in(out: Path) -> Iterator[Run]:
    """Yield the runs of a folder by name."""
    for path in sorted((out / FOLDER).glob("*.json")):
        try:
            yield run_of(json.loads(path.read_text(encoding="utf-8"))["run"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise SourceError(
                f"`{path}` does not say what a run is", hint="remove it, and train the run again"
            ) from error
