"""Weights of the Hub: downloaded before their subject is measured, evicted afterwards.

One thread follows the schedule: it fetches, waits until a subject is measured, evicts, and is a
subject ahead of the engine where the disk budget allows it. `ready` waits until every file of a
subject is on the disk and checked. Bytes are counted by content, not by checkpoint: two names
for the same weights are fetched once, and `folder` returns where they are.

A content that cannot be had ends the subjects that need it and nothing else; the remaining steps
are scheduled anew without them. A Hub that does not answer, or a full disk, ends the scan after
everything on the disk has been measured. The bytes that came are kept for the next run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.checkpoints.places import own_folder
from qaudit.downloads.schedule import Step
from qaudit.downloads.sources import EvictionRecord, Sources, download_schedule, refuse_shared_cache
from qaudit.errors import HubError, SourceError
from qaudit.types import Checkpoint, Subject

if TYPE_CHECKING:
    from qaudit.hub import Hub


class Downloads:
    """The weights of subjects, one after another."""

    def __init__(
        self,
        hub: Hub | None,
        subjects: Sequence[Subject],
        *,
        others: Sequence[Subject] = (),
        disk_budget_nbytes: int | None = None,
        record: Path | None = None,
    ) -> None:
        """Make the schedule; `others` need nothing, and may name other places of the same weights.

        `record` lists what an interrupted scan downloaded and this one may evict.
        """
        if hub is not None and disk_budget_nbytes is not None:
            refuse_shared_cache()
        self._subjects = tuple(subjects)
        evictable = EvictionRecord(record if disk_budget_nbytes is not None else None)
        self._sources = Sources(hub, (*subjects, *others), evictable) if hub else None
        self._schedule = download_schedule(subjects, self._sources, disk_budget_nbytes)
        self._order = self._schedule.order
        self._turn = 0  # the turns before it are over
        self._checked: dict[str, Checkpoint] = {}  # on the disk, and may be read
        self._refused: dict[str, HubError] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="downloads")
        self._work: Future[None] | None = None
        self.seconds_waited = 0.0

    @property
    def order(self) -> tuple[Subject, ...]:
        return tuple(self._subjects[position] for position in self._order)

    def folder(self, checkpoint: Checkpoint) -> Path:
        """Return where the weights of a checkpoint are, perhaps under another name for them."""
        return own_folder(self._checked.get(checkpoint.content, checkpoint))

    def __enter__(self) -> Downloads:
        if self._sources is not None and any(self._schedule.needs):
            self._work = self._thread.submit(self._walk, self._sources)
            self._work.add_done_callback(lambda _: self._advance(0))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Evict what is left to evict, or stop after an error and keep the bytes that came."""
        if kind is not None:
            self._stop()
        self._advance(len(self._order))
        try:
            self._thread.shutdown(wait=True)
        except KeyboardInterrupt:
            self._stop()
            raise

    @contextmanager
    def ready(self, subject: Subject) -> Iterator[None]:
        """Wait until the weights of a subject are on the disk; release them after the block.

        An error that is not the subject's own does not release them.
        """
        position = self._subjects.index(subject)
        turn = self._order.index(position)
        self._advance(turn)
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(position))
            self.seconds_waited += time.perf_counter() - began
            refusals = self._refusals(position)
            missing = self._is_missing(position)
        if refusals:
            raise refusals[0]
        if missing and self._work is not None:
            self._work.result()  # raises what ended the thread
        try:
            yield
        except SourceError:
            self._advance(turn + 1)
            raise
        self._advance(turn + 1)

    def _advance(self, turn: int) -> None:
        with self._changed:
            self._turn = max(self._turn, turn)
            self._changed.notify_all()

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._sources is not None:
            self._sources.stop()

    def _is_settled(self, position: int) -> bool:
        ended = self._work is None or self._work.done()
        return ended or bool(self._refusals(position)) or not self._is_missing(position)

    def _is_missing(self, position: int) -> bool:
        return any(key not in self._checked for key in self._schedule.needs[position])

    def _refusals(self, position: int) -> list[HubError]:
        needs = self._schedule.needs[position]
        return [self._refused[key] for key in needs if key in self._refused]

    def _walk(self, sources: Sources) -> None:
        """Take step after step; schedule the rest anew where one cannot be taken."""
        turns = {position: turn for turn, position in enumerate(self._order)}
        steps = deque(self._schedule.steps(self._order))
        while steps and not self._stopped:
            step = steps.popleft()
            if step.kind == "measure":
                self._wait_until_over(turns[step.position])
            elif step.kind == "evict":
                self._evict(sources, step.key)
            elif not self._fetch(sources, step.key):
                steps = deque(self._steps_left(sources))

    def _wait_until_over(self, turn: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._turn > turn)

    def _fetch(self, sources: Sources, key: str) -> bool:
        """Fetch and check a content; return whether the schedule still holds."""
        with self._changed:
            wanted = any(
                key in self._schedule.needs[position] for position in self._positions_left()
            )
            if key in self._checked or not wanted:
                return True
        try:
            checkpoint = sources.fetch(key)
        except HubError as error:
            with self._changed:
                self._refused[key] = error
                self._changed.notify_all()
            self._evict(sources, key)
            return False
        with self._changed:
            self._checked[key] = checkpoint
            self._changed.notify_all()
        return True

    def _evict(self, sources: Sources, key: str) -> None:
        with self._changed:
            self._checked.pop(key, None)
        if self._schedule.budget is not None and key not in self._schedule.cached:
            sources.evict(key)

    def _steps_left(self, sources: Sources) -> tuple[Step, ...]:
        with self._changed:
            positions = self._positions_left()
        present = frozenset(sources.on_disk) - self._schedule.cached
        return replace(self._schedule, present=present).steps(positions)

    def _positions_left(self) -> list[int]:
        return [p for p in self._order[self._turn :] if not self._refusals(p)]
