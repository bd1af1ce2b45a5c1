"""Downloads that take no time."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from qaudit.checkpoints.stamps import folder_of
from qaudit.downloads.downloads import Downloads, DownloadSchedule
from qaudit.errors import HubError, Interrupted, UnreachableError
from qaudit.types import Checkpoint, Ref, Subject, WeightFile

SOON = 10.0
"""Seconds after which something that should have happened has not."""


def checkpoint(label: str, *, content: str = "", repo: str = "org/series") -> Checkpoint:
    """Return a checkpoint of ten bytes on the Hub."""
    file = WeightFile("model.safetensors", 10, content or label)
    return Checkpoint(Ref(repo, label), label, (file,), commit=label.encode().hex().ljust(40, "0"))


def subject(*members: Checkpoint) -> Subject:
    if len(members) == 1:
        return Subject(members[0].label, ((members[0], 1.0),))
    label = "+".join(member.label for member in members)
    return Subject(label, tuple((member, 1.0) for member in members), merge="mean")


@dataclass
class Fake:
    """A fetcher that fetches names: `gates` hold a checkpoint back until they are opened."""

    refused: dict[str, Exception] = field(default_factory=dict)
    gates: dict[str, threading.Event] = field(default_factory=dict)
    disk: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    kept: dict[str, set[str]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    stopped: bool = False
    silent: bool = False  # whether no question is answered either

    def nbytes_missing(self, checkpoint: Checkpoint) -> int:
        return 0 if checkpoint.label in self.disk else checkpoint.nbytes

    def weights(self, checkpoint: Checkpoint) -> Path:
        label = checkpoint.label
        self._note(f"begin {label}")
        if label in self.gates:
            with self.changed:
                self.changed.wait_for(lambda: self.stopped or self.gates[label].is_set(), SOON)
        if self.stopped:
            raise Interrupted("stopped")
        if label in self.refused:
            raise self.refused[label]
        self.disk.add(label)
        self._note(f"fetch {label}")
        return folder_of(checkpoint)

    def evict(self, checkpoint: Checkpoint, *, keep: Iterable[Checkpoint] = ()) -> int:
        self.kept[checkpoint.label] = {c.label for c in keep}
        self.disk.discard(checkpoint.label)
        self._note(f"evict {checkpoint.label}")
        return 10

    def break_off(self) -> None:
        self._note("break off")
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def commit(self, repo: str, revision: str) -> str:
        if self.silent:
            raise UnreachableError("silence")
        return revision

    def open(self, label: str) -> None:
        with self.changed:
            self.gates[label].set()
            self.changed.notify_all()

    def until(self, what: str) -> bool:
        """Wait until something is in the log."""
        with self.changed:
            return self.changed.wait_for(lambda: what in self.log, SOON)

    def done(self) -> list[str]:
        """Return what was fetched and evicted, in order."""
        return [line for line in self.log if not line.startswith("begin")]

    def _note(self, line: str) -> None:
        with self.changed:
            self.log.append(line)
            self.changed.notify_all()


def measure(downloads: Downloads) -> list[str]:
    """Measure everything that is ready; return what was measured and what was refused."""
    seen = []
    for one in downloads.order:
        try:
            with downloads.ready(one):
                seen.append(one.label)
        except HubError as error:
            seen.append(f"{one.label}: {error.message}")
    return seen


def total(schedule: DownloadSchedule, keys: set[str]) -> int:
    return sum(schedule.nbytes[key] for key in keys)
