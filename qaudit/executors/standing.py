"""How far the parts of a plan are, from their records and logs. No torch."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from qaudit.executors.on_disk import RoundState, state_of
from qaudit.report.format import duration
from qaudit.saved.parts import FOLDER, last_round, read_run

SILENT_SECONDS = 300.0
"""A part that wrote nothing for so long may be gone: a block of a large model takes less."""


@dataclass(frozen=True)
class PartState:
    """What the log of one part says last."""

    name: str
    host: str
    state: str  # running, silent, done or stopped
    subject: str
    seconds: tuple[float, ...]  # of each subject that it measured


@dataclass(frozen=True)
class Standing:
    """A round, and the parts that have worked on the plan."""

    state: RoundState
    parts: tuple[PartState, ...]

    @property
    def left_seconds(self) -> float | None:
        """Return the time left at the pace of the parts that run; None where nothing runs."""
        running = sum(part.state == "running" for part in self.parts)
        seconds = [s for part in self.parts for s in part.seconds]
        if not running or not seconds:
            return None
        return len(self.state.missing) * median(seconds) / running

    @property
    def table(self) -> dict[str, Any]:
        """Return everything as JSON."""
        state = self.state
        return {
            "round": state.number,
            "subjects": len(state.units),
            "measured": len(state.units) - len(state.missing) - len(state.failed),
            "failed": [unit.label for unit in state.failed],
            "missing": [unit.label for unit in state.missing],
            "seconds_left": self.left_seconds,
            "parts": [
                {"part": p.name, "host": p.host, "state": p.state, "subject": p.subject}
                for p in self.parts
            ],
        }


def standing_of(out: Path) -> Standing:
    """Read the records and the logs of a folder."""
    run, _ = read_run(out)
    logs = sorted((out / FOLDER).glob("*-of-*.jsonl"), key=lambda path: (len(path.name), path.name))
    parts = (_part_state(path) for path in logs)
    return Standing(state_of(run, out, last_round(out)), tuple(p for p in parts if p))


def _part_state(path: Path) -> PartState | None:
    lines = [line for line in map(_parsed, _lines(path)) if line]
    starts = [line for line in lines if line.get("began")]
    if not starts:
        return None
    last = lines[-1]
    subjects = [str(line["subject"]) for line in lines if "subject" in line]
    ended = last.get("ended")
    if ended:
        state = "done" if ended == "done" else "stopped"
    else:
        state = "running" if time.time() - float(last["at"]) < SILENT_SECONDS else "silent"
    return PartState(
        name=path.stem.replace("-of-", "/"),
        host=str(starts[-1].get("host", "")),
        state=state,
        subject=subjects[-1] if subjects and not ended else "",
        seconds=tuple(
            float(line["seconds"]) for line in lines if line.get("outcome") == "measured"
        ),
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _parsed(line: str) -> dict[str, Any]:
    """Return a line; one that was cut by a kill is empty."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) and "at" in value else {}


def render(standing: Standing) -> str:
    """Return the standing as text."""
    state, table = standing.state, standing.table
    left = standing.left_seconds
    first = (
        f"round {state.number}: {table['measured']} of {len(state.units)} subjects measured, "
        f"{len(state.failed)} failed, {len(state.missing)} missing"
    )
    time_left = "" if left is None else f"; about {duration(left)} left"
    rows = [
        f"  part {part.name:<8} {part.state:<8} {part.host} {part.subject}".rstrip()
        for part in standing.parts
    ]
    return "\n".join([first + time_left, *rows])
