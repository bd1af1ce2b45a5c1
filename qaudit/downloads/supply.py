"""Weights of the Hub, on the disk when their turn comes and gone when it is over.

One thread walks the itinerary: it fetches, waits until a subject is measured, evicts, and is a
subject ahead of the engine wherever the disk budget lets it. Whoever measures waits in `ready`
until every file of a subject is there and checked. What is lacking is counted in bytes of
contents, not of checkpoints: two names for the same weights, in one repository or in two, are
fetched once, and `folder` says where they lie.

A soup whose members do not lie on the disk together is added up by that thread while they pass
by, and is ready once all of them are in: `ready` then hands out its merged tensors.

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

from qaudit.checkpoints.places import folder_of
from qaudit.downloads.brought import Brought
from qaudit.downloads.itinerary import Step, Sum
from qaudit.downloads.load import Load, trip_of
from qaudit.errors import HubError, Interrupted, SourceError
from qaudit.types import Checkpoint, Subject

if TYPE_CHECKING:
    from qaudit.downloads.running_sum import SummedWeights
    from qaudit.downloads.sums import Sums
    from qaudit.hub import Hub


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
        sums: Sums | None = None,
    ) -> None:
        """Plan the way; `others` need nothing, and may know other places for the same weights.

        In `record` a resumed scan finds what the one before brought, and may evict; in `sums`,
        how far it came with soups that do not fit. Without them no soup is summed up.
        """
        self._subjects = tuple(subjects)
        brought = Brought(record if disk_budget_nbytes is not None else None)
        self._load = Load(hub, (*subjects, *others), brought) if hub else None
        self._sums = sums
        self._trip = trip_of(subjects, self._load, disk_budget_nbytes, sums).settled()
        self._order = self._trip.order()
        self._left = {p: one.lacking for p, one in self._trip.summed.items()}  # to be added
        self._unsummed: dict[int, SourceError] = {}
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
        """Begin to fetch, without what of an earlier scan is of no use."""
        if self._sums is not None:
            begun = (self._subjects[p] for p, one in self._trip.summed.items() if one.begun)
            self._sums.keep(begun)
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
    def ready(self, subject: Subject) -> Iterator[SummedWeights | None]:
        """Wait until the weights of a subject are there; let them go when the block is left.

        What is handed out are the tensors of a soup that was summed up; None: it lies in folders.
        They stay where anything but the subject itself was the reason to leave.
        """
        position = self._subjects.index(subject)
        turn = self._order.index(position)
        self._advance(turn)
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(position))
            self.seconds_waited += time.perf_counter() - began
            refusals = self._refusals(position)
            lacking = self._lacking(position)
        if refusals:
            raise refusals[0]
        if lacking and self._work is not None:
            self._work.result()  # raises what ended the thread
        try:
            yield self._merged(position)
        except SourceError:
            self._advance(turn + 1)
            raise
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
        if position in self._left:
            return bool(self._left[position])
        return any(key not in self._there for key in self._trip.needs[position])

    def _is_doomed(self, position: int) -> bool:
        return bool(self._refusals(position))

    def _refusals(self, position: int) -> list[SourceError]:
        """Return why a subject cannot be had, if so."""
        needs = self._left.get(position, self._trip.needs[position])
        found: list[SourceError] = [self._refused[key] for key in needs if key in self._refused]
        return [self._unsummed[position]] if position in self._unsummed else found

    def _merged(self, position: int) -> SummedWeights | None:
        if self._sums is None or position not in self._left:
            return None
        return self._sums.weights(self._subjects[position])

    # ------------------------------------------------------------------ what the thread does

    def _walk(self, load: Load) -> None:
        """Take step after step; without what is refused the steps that are left are others."""
        turns = {position: turn for turn, position in enumerate(self._order)}
        steps = deque(self._trip.steps(self._order))
        while steps and not self._stopped:
            step = steps.popleft()
            if step.kind == "measure":
                self._wait_until_over(turns[step.position])
            elif step.kind == "drop":
                self._drop(step.position)
            elif step.kind == "evict":
                self._evict(load, step.key)
            elif not (self._add(load, step) if step.kind == "add" else self._bring(load, step.key)):
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

    def _add(self, load: Load, step: Step) -> bool:
        """Add a member to the sum of its soup; say whether the way may go on as it was planned."""
        soup = self._subjects[step.position]
        with self._changed:
            if step.position not in self._positions_left():
                return True
        member = next(c for c, _ in soup.members if c.content == step.key)
        assert self._sums is not None, "sums are planned only where there is a place for them"
        try:
            self._sums.add(soup, member, self.folder(member), self._must_go_on)
        except SourceError as error:
            with self._changed:
                self._unsummed[step.position] = error
                self._changed.notify_all()
            return False
        with self._changed:
            self._left[step.position] = self._left[step.position][1:]
            self._changed.notify_all()
        return True

    def _must_go_on(self) -> None:
        if self._stopped:
            raise Interrupted(
                "stopped while a soup was summed up; what is in stays in",
                hint="run the same command again",
            )

    def _drop(self, position: int) -> None:
        if self._sums is not None:
            self._sums.remove(self._subjects[position])

    def _evict(self, load: Load, key: str) -> None:
        with self._changed:
            self._there.pop(key, None)
        if self._trip.budget is not None and key not in self._trip.cached:
            load.evict(key)

    def _steps_left(self, load: Load) -> tuple[Step, ...]:
        """Plan what is left without what cannot be had; the sums of such soups go first."""
        with self._changed:
            positions = self._positions_left()
            ended = [p for p in self._left if p not in positions]
            sums = {**self._trip.sums, **{p: self._begun(p) for p in self._left}}
        for position in ended:
            self._drop(position)
        present = frozenset(load.lying) - self._trip.cached
        return replace(self._trip, present=present, sums=sums).steps(positions)

    def _begun(self, position: int) -> Sum:
        """Return a sum as it stands now."""
        one = self._trip.sums[position]
        added = len(one.members) - len(self._left[position])
        return replace(one, begun=one.begun or added > 0, added=added)

    def _positions_left(self) -> list[int]:
        return [p for p in self._order[self._turn :] if not self._is_doomed(p)]
