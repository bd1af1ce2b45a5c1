"""The log of a folder's runs: one line of JSON for every tenth step and every one written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qaudit.errors import SourceError, not_written
from qaudit.whole import write_whole

LOG = "training.jsonl"


def log_line(out: Path, line: Mapping[str, Any]) -> None:
    """Add a line to the log."""
    try:
        with (out / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(dict(line)) + "\n")
    except OSError as error:
        raise not_written(out / LOG, error) from error


def read_log(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a folder's training log."""
    try:
        with (out / LOG).open(encoding="utf-8") as log:
            yield from (json.loads(line) for line in log)
    except FileNotFoundError as error:
        raise SourceError(
            f"there is no log `{out / LOG}`", hint="`qaudit lab train` leaves one in its folder"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(
            f"the log `{out / LOG}` cannot be read: {error}", hint="take out the line that is cut"
        ) from error


def forget_after(out: Path, run: str, step: int) -> None:
    """Drop what a run logged past a step: it is about to take those steps again."""
    if not (out / LOG).exists():
        return
    lines = (out / LOG).read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not _is_after(line, run, step)]
    if len(kept) < len(lines):
        write_whole(out / LOG, "".join(kept))


def _is_after(line: str, run: str, step: int) -> bool:
    try:
        said = json.loads(line)
        return bool(said["run"] == run and said["step"] > step)
    except (ValueError, LookupError, TypeError, RecursionError):
        return True  # cut off when the machine stopped, or nothing that was logged here
