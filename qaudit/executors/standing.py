"""How far the parts of a plan are, from their records and logs. No torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from qaudit.executors.on_disk import RoundState, state_of
from qaudit.executors.part_log import read_logs
from qaudit.report.format import duration
from qaudit.saved.parts import last_round, read_run
from qaudit.types import Watch

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
    parts = (_part_state(name, lines) for name, lines in read_logs(out).items())
    return Standing(state_of(run, out, last_round(out)), tuple(p for p in parts if p))


def _part_state(name: str, lines: Sequence[Mapping[str, Any]]) -> PartState | None:
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
        name=name.replace("-of-", "/"),
        host=str(starts[-1].get("host", "")),
        state=state,
        subject=subjects[-1] if subjects and not ended else "",
        seconds=tuple(
            float(line["seconds"]) for line in lines if line.get("outcome") == "measured"
        ),
    )


def show(out: Path, watch: Watch) -> None:
    """Draw the bar of a round, from records and logs."""
    standing = standing_of(out)
    total, missing = len(standing.state.units), len(standing.state.missing)
    watch.count("subjects", total - missing, total, standing.left_seconds)


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
