"""Weights of the Hub, on the disk when their turn comes and gone when it is over.

One thread walks the itinerary: it fetches, waits until a subject is measured, evicts, and is a
subject ahead of the engine wherever the disk budget lets it. Whoever measures waits in `ready`
until every file of a subject is there and checked. What is lacking is counted in bytes of
contents, not of checkpoints: two names for the same weights, in one repository or in two, are
fetched once, and `folder` says where they lie.

A content that cannot be had is the end of the subjects that need it and of nothing else; the
steps that are left are planned anew without them. A Hub that does not answer, or a disk that is
full, ends the scan, but not before everything that is there has been measured. Whatever ends
it, the thread stops within a chunk, and the bytes that came are kept for the next time.
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

from qaudit.engine.brought import Brought
from qaudit.engine.itinerary import Step, Trip
from qaudit.errors import HubError
from qaudit.sources.places import folder_of
from qaudit.types import Checkpoint, Ref, Subject

if TYPE_CHECKING:
    from qaudit.sources.hub import Hub


class Supply:
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
        """Plan the way; `others` need nothing, and may know other places for the same weights.

        In `record` a resumed scan finds what the one before brought, and may evict.
        """
        self._subjects = tuple(subjects)
        brought = Brought(record if disk_budget_nbytes is not None else None)
        self._load = Load(hub, (*subjects, *others), brought) if hub else None
        self._trip = trip_of(subjects, self._load, disk_budget_nbytes)
        self._order = self._trip.order()
        self._turn = 0  # the turns before it are over
        self._there: dict[str, Checkpoint] = {}  # checked: may be read
        self._refused: dict[str, HubError] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="supply")
        self._work: Future[None] | None = None
        self.seconds_waited = 0.0

    @property
    def order(self) -> tuple[Subject, ...]:
        """The subjects in the order in which they become ready."""
        return tuple(self._subjects[position] for position in self._order)

    def folder(self, checkpoint: Checkpoint) -> Path:
        """Return where the weights of a checkpoint lie, perhaps under another name for them."""
        return folder_of(self._there.get(checkpoint.content, checkpoint))

    def __enter__(self) -> Supply:
        """Begin to fetch."""
        if self._load is not None and any(self._trip.needs):
            self._work = self._thread.submit(self._walk, self._load)
            self._work.add_done_callback(lambda _: self._advance(0))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Evict what is left to evict, or stop where something went wrong; keep what came."""
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
        """Wait until the weights of a subject are there; let them go when the block is left."""
        position = self._subjects.index(subject)
        turn = self._order.index(position)
        self._advance(turn)
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(position))
            self.seconds_waited += time.perf_counter() - began
            refusals = [self._refused[k] for k in self._trip.needs[position] if k in self._refused]
            lacking = self._lacking(position)
        if refusals:
            raise refusals[0]
        if lacking and self._work is not None:
            self._work.result()  # raises what ended the thread
        try:
            yield
        finally:
            self._advance(turn + 1)

    # ------------------------------------------------------------------- what both threads tell

    def _advance(self, turn: int) -> None:
        with self._changed:
            self._turn = max(self._turn, turn)
            self._changed.notify_all()

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._load is not None:
            self._load.stop()

    def _is_settled(self, position: int) -> bool:
        ended = self._work is None or self._work.done()
        return ended or self._is_doomed(position) or not self._lacking(position)

    def _lacking(self, position: int) -> bool:
        return any(key not in self._there for key in self._trip.needs[position])

    def _is_doomed(self, position: int) -> bool:
        return any(key in self._refused for key in self._trip.needs[position])

    # ------------------------------------------------------------------ what the thread does

    def _walk(self, load: Load) -> None:
        """Take step after step; without what is refused the steps that are left are others."""
        turns = {position: turn for turn, position in enumerate(self._order)}
        steps = deque(self._trip.steps(self._order))
        while steps and not self._stopped:
            step = steps.popleft()
            if step.kind == "measure":
                self._wait_until_over(turns[step.position])
            elif step.kind == "evict":
                self._evict(load, step.key)
            elif not self._bring(load, step.key):
                steps = deque(self._steps_left(load))

    def _wait_until_over(self, turn: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._turn > turn)

    def _bring(self, load: Load, key: str) -> bool:
        """Fetch and check a content; say whether the way may go on as it was planned."""
        with self._changed:
            wanted = any(key in self._trip.needs[position] for position in self._positions_left())
            if key in self._there or not wanted:
                return True
        try:
            found = load.bring(key)
        except HubError as error:
            with self._changed:
                self._refused[key] = error
                self._changed.notify_all()
            self._evict(load, key)
            return False
        with self._changed:
            self._there[key] = found
            self._changed.notify_all()
        return True

    def _evict(self, load: Load, key: str) -> None:
        with self._changed:
            self._there.pop(key, None)
        if self._trip.budget is not None and key not in self._trip.cached:
            load.evict(key)

    def _steps_left(self, load: Load) -> tuple[Step, ...]:
        with self._changed:
            positions = self._positions_left()
        present = frozenset(load.lying) - self._trip.cached
        return replace(self._trip, present=present).steps(positions)

    def _positions_left(self) -> list[int]:
        return [p for p in self._order[self._turn :] if not self._is_doomed(p)]


class Load:
    """The contents that subjects need, where each may come from, and which lie on the disk."""

    def __init__(self, hub: Hub, subjects: Sequence[Subject], brought: Brought) -> None:
        """Find every name of a content, the one that is cheapest to fetch first."""
        self._hub, self._brought = hub, brought
        fetcher = hub.fetcher
        found: dict[str, dict[Ref, Checkpoint]] = {}
        for subject in subjects:
            for checkpoint in _remote(subject):
                found.setdefault(checkpoint.content, {})[checkpoint.ref] = checkpoint
        self.sources = {
            key: sorted(names.values(), key=fetcher.nbytes_missing) for key, names in found.items()
        }
        missing = {key: fetcher.nbytes_missing(names[0]) for key, names in self.sources.items()}
        whole = {key for key, nbytes in missing.items() if not nbytes}
        self.present = frozenset(key for key in whole if key in brought)
        self.cached = frozenset(whole - self.present)
        self.nbytes = {
            key: self.sources[key][0].nbytes if key in brought else nbytes
            for key, nbytes in missing.items()
        }
        self.lying = {key: self.sources[key][0] for key in whole}

    def bring(self, key: str) -> Checkpoint:
        """Fetch and check a content under one of its names; fail if none of them can be had."""
        if key not in self.cached:
            self._brought.add(key)
        failures = []
        for checkpoint in self.sources[key]:
            try:
                self._hub.fetcher.weights(checkpoint)
            except HubError as error:
                failures.append(error)
                continue
            self.lying[key] = checkpoint
            return checkpoint
        raise failures[0]

    def evict(self, key: str) -> None:
        """Take a content off the disk, but for what others share with it."""
        gone = self.lying.pop(key, None)
        for checkpoint in [gone] if gone else self.sources[key]:
            self._hub.fetcher.evict(checkpoint, keep=tuple(self.lying.values()))
        self._brought.remove(key)

    def stop(self) -> None:
        """Let whatever is being fetched end within a chunk, even if none comes any more."""
        self._hub.fetcher.stop()
        self._hub.client.break_off()


def _remote(subject: Subject) -> list[Checkpoint]:
    return [checkpoint for checkpoint, _ in subject.members if checkpoint.commit is not None]


def trip_of(subjects: Sequence[Subject], load: Load | None, budget: int | None) -> Trip:
    """Return what subjects need of a load: the same for whoever prices it and whoever fetches."""
    return Trip(
        needs=tuple(
            tuple(dict.fromkeys(c.content for c in _remote(subject))) if load else ()
            for subject in subjects
        ),
        nbytes=load.nbytes if load else {},
        cached=load.cached if load else frozenset(),
        present=load.present if load else frozenset(),
        budget=budget,
        labels=tuple(subject.label for subject in subjects),
    )
