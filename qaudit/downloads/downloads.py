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

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from qaudit.checkpoints.stamps import hub_cache, own_folder
from qaudit.downloads.schedule import (
    DownloadSchedule,
    refuse_shared_cache,
    refuse_what_cannot_fit,
)
from qaudit.errors import HubError, SourceError, UnreachableError, not_written
from qaudit.host import free_disk_nbytes
from qaudit.hub import Hub
from qaudit.types import Checkpoint, Subject
from qaudit.whole import write_whole


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
        self._hub, self._subjects = hub, tuple(subjects)
        self._record = record if disk_budget_nbytes is not None else None
        self._schedule = DownloadSchedule(tuple(() for _ in subjects), {})
        if hub is not None:
            self._schedule = DownloadSchedule.of(
                hub, subjects, others, self._record, disk_budget_nbytes
            )
        if hub is not None and disk_budget_nbytes is not None:
            refuse_shared_cache()
            free = free_disk_nbytes(hub_cache())
            refuse_what_cannot_fit(self._schedule, subjects, disk_budget_nbytes, 0, free)
        here = self._schedule.cached | self._schedule.present
        self._on_disk = {key: self._schedule.checkpoints[key][0] for key in here}
        self._recorded = self._schedule.recorded
        self._failed_before = False  # whether the content before could not be had
        self._order = self._schedule.order
        self._turn = 0  # the turns before it are over
        self._checked: dict[str, Checkpoint] = {}  # on the disk, and may be read
        self._refused: dict[str, HubError] = {}
        self._changed = threading.Condition()
        self._stopped = self._ended = False
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
        if self._hub is not None and any(self._schedule.needs):
            self._work = self._thread.submit(self._walk, self._hub)
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
            self._changed.wait_for(
                lambda: self._ended or self._refusals(position) or not self._is_missing(position)
            )
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
        if self._hub is not None:  # within a chunk, even if no bytes come any more
            self._hub.client.break_off()

    def _is_missing(self, position: int) -> bool:
        return any(key not in self._checked for key in self._schedule.needs[position])

    def _refusals(self, position: int) -> list[HubError]:
        needs = self._schedule.needs[position]
        return [self._refused[key] for key in needs if key in self._refused]

    def _walk(self, hub: Hub) -> None:
        """Take step after step; schedule the rest anew where one cannot be taken."""
        turns = {position: turn for turn, position in enumerate(self._order)}
        steps = deque(self._schedule.steps(self._order))
        try:
            while steps and not self._stopped:
                step = steps.popleft()
                if step.kind == "measure":
                    self._wait_until_over(turns[step.position])
                elif step.kind == "evict":
                    self._evict(hub, step.key)
                elif not self._fetch(hub, step.key):
                    with self._changed:
                        positions = self._positions_left()
                    present = frozenset(self._on_disk) - self._schedule.cached
                    steps = deque(replace(self._schedule, present=present).steps(positions))
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _wait_until_over(self, turn: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._turn > turn)

    def _fetch(self, hub: Hub, key: str) -> bool:
        """Fetch and check a content; return whether the schedule still holds."""
        with self._changed:
            needs = [self._schedule.needs[position] for position in self._positions_left()]
            if key in self._checked or not any(key in keys for keys in needs):
                return True
        try:
            checkpoint = self._fetched(hub, key)
        except HubError as error:
            with self._changed:
                self._refused[key] = error
                self._changed.notify_all()
            self._evict(hub, key)
            return False
        with self._changed:
            self._checked[key] = self._on_disk[key] = checkpoint
            self._changed.notify_all()
        return True

    def _fetched(self, hub: Hub, key: str) -> Checkpoint:
        """Fetch a content from the first place that has it.

        Where the Hub answers and its files do not come, the error is of one checkpoint. After two
        in a row the scan ends, as it does where the Hub does not answer.
        """
        if key not in self._schedule.cached:
            self._note(self._recorded | {key})
        failures: list[HubError] = []
        for checkpoint in self._schedule.checkpoints[key]:
            try:
                hub.fetcher.weights(checkpoint)
            except HubError as error:
                failures.append(error)
            except UnreachableError as error:
                if self._failed_before:
                    raise
                hub.client.commit(checkpoint.ref.location, str(checkpoint.commit))
                hint = "run the same command again later"
                failures.append(_FileError(error.message, hint=hint))
            else:
                self._failed_before = False
                return checkpoint
        self._failed_before = any(isinstance(failure, _FileError) for failure in failures)
        raise failures[0]

    def _evict(self, hub: Hub, key: str) -> None:
        """Remove a content from the disk, but for files that others share with it."""
        with self._changed:
            self._checked.pop(key, None)
        if self._schedule.budget is None or key in self._schedule.cached:
            return
        gone = self._on_disk.pop(key, None)
        for checkpoint in [gone] if gone else self._schedule.checkpoints[key]:
            hub.fetcher.evict(checkpoint, keep=tuple(self._on_disk.values()))
        self._note(self._recorded - {key})

    def _positions_left(self) -> list[int]:
        return [p for p in self._order[self._turn :] if not self._refusals(p)]

    def _note(self, contents: frozenset[str]) -> None:
        """Record what was downloaded; the file is there as long as the list is not empty."""
        if self._record is None or contents == self._recorded:
            return
        self._recorded = contents
        if contents:
            write_whole(self._record, json.dumps(sorted(contents), indent=1))
            return
        try:
            self._record.unlink(missing_ok=True)
        except OSError as error:
            raise not_written(self._record, error) from error


class _FileError(HubError):
    """A file cannot be downloaded, while the Hub answers."""
