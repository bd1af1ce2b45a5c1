"""The log of one part, for `qaudit status`, and attempts that did not end. No torch."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from qaudit.saved.codec import parse
from qaudit.saved.parts import FOLDER
from qaudit.types import Watch
from qaudit.whole import read_regular

ATTEMPTS = 2
"""A unit that ended its process so many times is given up: its subject is skipped."""

SECONDS_BETWEEN_BLOCKS = 10.0
_LARGEST_NBYTES = 2**28
_NAME = re.compile(r"[0-9]{1,9}-of-0*[1-9][0-9]{0,8}")


class PartLog(Watch):
    """Appends to `K-of-N.jsonl`, one line for each subject, and passes progress on."""

    def __init__(self, path: Path, attempts_of: Callable[[str], Path] | None, watch: Watch) -> None:
        """Log into `path`; `attempts_of` has the file that counts attempts at a subject."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._attempts_of, self._watch = path, attempts_of, watch
        self._current, self._last_block = "", 0.0

    def __enter__(self) -> PartLog:
        self._line(
            began=True,
            host=platform.node(),
            pid=os.getpid(),
            job=os.environ.get("SLURM_JOB_ID"),
            device=os.environ.get("CUDA_VISIBLE_DEVICES"),
            restarts=os.environ.get("SLURM_RESTART_COUNT"),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Write how it ended; a part that is told to stop does not count as a failed attempt."""
        if isinstance(error, KeyboardInterrupt) and self._current:
            self._forget_attempts(self._current)
        self._line(ended="done" if kind is None else getattr(kind, "__name__", "error"))

    def expect(self, costs: Mapping[str, float]) -> None:
        self._watch.expect(costs)

    def subject(self, done: int, total: int, label: str, passes: int = 1) -> None:
        """Begin a subject: if its process dies, the attempt stays counted."""
        self._watch.subject(done, total, label, passes)
        self._current = label
        if label:
            if self._attempts_of is not None:
                with self._attempts_of(label).open("a", encoding="utf-8") as file:
                    file.write(f"{platform.node()} {time.time():.0f}\n")
            self._line(subject=label, done=done, total=total)

    def block(self, done: int, total: int, what: str) -> None:
        self._watch.block(done, total, what)
        if time.monotonic() - self._last_block > SECONDS_BETWEEN_BLOCKS:
            self._last_block = time.monotonic()
            self._line(block=done, blocks=total, what=what)

    def download(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        self._watch.download(what, done_nbytes, total_nbytes)

    def note(self, text: str) -> None:
        self._watch.note(text)
        self._line(note=text)

    def finished(self, label: str, outcome: str, seconds: float, record: Path) -> None:
        self._forget_attempts(label)
        values = {"measured": label, "outcome": outcome, "seconds": round(seconds, 3)}
        self._line(**values, record=record.name)

    def _forget_attempts(self, label: str) -> None:
        if self._attempts_of is not None:
            self._attempts_of(label).unlink(missing_ok=True)

    def _line(self, **values: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": round(time.time(), 2), **values}) + "\n")


def read_logs(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of each part's log, by the part's name; one that a kill cut is left out."""
    logs = [path for path in (out / FOLDER).glob("*-of-*.jsonl") if _NAME.fullmatch(path.stem)]
    logs.sort(key=lambda path: (len(path.name), path.name))
    return {path.stem: [line for line in map(_parsed, _lines(path)) if line] for path in logs}


def _lines(path: Path) -> list[str]:
    try:
        content = read_regular(path, _LARGEST_NBYTES)
    except OSError:
        return []
    return content.decode(errors="replace").splitlines()


def _parsed(line: str) -> dict[str, Any]:
    try:
        value = parse(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) and is_number(value.get("at")) else {}


def is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def attempts(path: Path) -> int:
    """Return how many attempts at a subject began and did not end."""
    try:
        return len(path.read_text(encoding="utf-8").splitlines())
    except OSError:
        return 0
