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
from qaudit.downloads.schedule import DownloadSchedule, Step, refuse_what_cannot_fit
from qaudit.errors import HubError, MachineError, SourceError, UnreachableError, not_written
from qaudit.host import free_disk_nbytes, shared_file_system
from qaudit.hub import Hub
from qaudit.types import Checkpoint, Ref, Subject
from qaudit.whole import write_whole

RECORD_FILE = "fetched.json"
"""The name of the record in an output folder."""


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
        record = record if disk_budget_nbytes is not None else None
        self._contents = Contents(hub, (*subjects, *others), record) if hub else None
        self._schedule = DownloadSchedule(tuple(() for _ in subjects), {})
        if self._contents is not None:
            self._schedule = self._contents.schedule(subjects, disk_budget_nbytes)
            if disk_budget_nbytes is not None:
                free = free_disk_nbytes(hub_cache())
                refuse_what_cannot_fit(self._schedule, subjects, disk_budget_nbytes, 0, free)
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
        if self._contents is not None and any(self._schedule.needs):
            self._work = self._thread.submit(self._walk, self._contents)
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
        if self._contents is not None:
            self._contents.stop()

    def _is_settled(self, position: int) -> bool:
        ended = self._work is None or self._work.done()
        return ended or bool(self._refusals(position)) or not self._is_missing(position)

    def _is_missing(self, position: int) -> bool:
        return any(key not in self._checked for key in self._schedule.needs[position])

    def _refusals(self, position: int) -> list[HubError]:
        needs = self._schedule.needs[position]
        return [self._refused[key] for key in needs if key in self._refused]

    def _walk(self, contents: Contents) -> None:
        """Take step after step; schedule the rest anew where one cannot be taken."""
        turns = {position: turn for turn, position in enumerate(self._order)}
        steps = deque(self._schedule.steps(self._order))
        while steps and not self._stopped:
            step = steps.popleft()
            if step.kind == "measure":
                self._wait_until_over(turns[step.position])
            elif step.kind == "evict":
                self._evict(contents, step.key)
            elif not self._fetch(contents, step.key):
                steps = deque(self._steps_left(contents))

    def _wait_until_over(self, turn: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._turn > turn)

    def _fetch(self, contents: Contents, key: str) -> bool:
        """Fetch and check a content; return whether the schedule still holds."""
        with self._changed:
            wanted = any(
                key in self._schedule.needs[position] for position in self._positions_left()
            )
            if key in self._checked or not wanted:
                return True
        try:
            checkpoint = contents.fetch(key)
        except HubError as error:
            with self._changed:
                self._refused[key] = error
                self._changed.notify_all()
            self._evict(contents, key)
            return False
        with self._changed:
            self._checked[key] = checkpoint
            self._changed.notify_all()
        return True

    def _evict(self, contents: Contents, key: str) -> None:
        with self._changed:
            self._checked.pop(key, None)
        if self._schedule.budget is not None and key not in self._schedule.cached:
            contents.evict(key)

    def _steps_left(self, contents: Contents) -> tuple[Step, ...]:
        with self._changed:
            positions = self._positions_left()
        present = frozenset(contents.on_disk) - self._schedule.cached
        return replace(self._schedule, present=present).steps(positions)

    def _positions_left(self) -> list[int]:
        return [p for p in self._order[self._turn :] if not self._refusals(p)]


class _FileError(HubError):
    """A file cannot be downloaded, while the Hub answers."""


class Contents:
    """The weights that subjects need by content: which checkpoints hold each, and what is here.

    A budget is for what a scan adds to the disk. A scan that is killed leaves weights behind; the
    next one has to count and evict them, and must not evict what was there before. So contents
    are recorded beside the results before their first byte comes. The file is there as long as
    the list is not empty; without a path nothing is recorded.
    """

    def __init__(self, hub: Hub, subjects: Sequence[Subject], record: Path | None) -> None:
        """Find every checkpoint of a content, the one that is cheapest to fetch first."""
        self._hub, self._record = hub, record
        self.recorded = _recorded(record) if record else frozenset[str]()
        fetcher = hub.fetcher
        places: dict[str, dict[Ref, Checkpoint]] = {}
        for subject in subjects:
            for checkpoint in _remote(subject):
                places.setdefault(checkpoint.content, {})[checkpoint.ref] = checkpoint
        self.checkpoints = {
            key: sorted(refs.values(), key=fetcher.nbytes_missing) for key, refs in places.items()
        }
        missing = {key: fetcher.nbytes_missing(c[0]) for key, c in self.checkpoints.items()}
        whole = {key for key, nbytes in missing.items() if not nbytes}
        self.present = frozenset(whole & self.recorded)
        self.cached = frozenset(whole - self.present)
        self.nbytes = {
            key: self.checkpoints[key][0].nbytes if key in self.recorded else nbytes
            for key, nbytes in missing.items()
        }
        self.on_disk = {key: self.checkpoints[key][0] for key in whole}
        self.nbytes_here = {k: self.checkpoints[k][0].nbytes - n for k, n in missing.items()}
        self._failed_before = False  # whether the content before could not be had

    def schedule(self, subjects: Sequence[Subject], budget: int | None) -> DownloadSchedule:
        """Return the schedule that a plan prices and that `Downloads` follows."""
        return DownloadSchedule(
            needs=tuple(tuple(dict.fromkeys(c.content for c in _remote(s))) for s in subjects),
            nbytes=self.nbytes,
            cached=self.cached,
            present=self.present,
            budget=budget,
        )

    def fetch(self, key: str) -> Checkpoint:
        if key not in self.cached:
            self._note(self.recorded | {key})
        failures = []
        for checkpoint in self.checkpoints[key]:
            try:
                self._hub.fetcher.weights(checkpoint)
            except HubError as error:
                failures.append(error)
                continue
            except UnreachableError as error:
                failures.append(self._of_this_one(checkpoint, error))
                continue
            self.on_disk[key] = checkpoint
            self._failed_before = False
            return checkpoint
        self._failed_before = any(isinstance(failure, _FileError) for failure in failures)
        raise failures[0]

    def _of_this_one(self, checkpoint: Checkpoint, error: UnreachableError) -> HubError:
        """Return the error of one checkpoint if the Hub answers and its files do not come.

        After two in a row the scan ends, as it does where the Hub does not answer.
        """
        if self._failed_before:
            raise error
        self._hub.client.commit(checkpoint.ref.location, str(checkpoint.commit))
        return _FileError(error.message, hint="run the same command again later")

    def evict(self, key: str) -> None:
        """Remove a content from the disk, but for files that others share with it."""
        gone = self.on_disk.pop(key, None)
        for checkpoint in [gone] if gone else self.checkpoints[key]:
            self._hub.fetcher.evict(checkpoint, keep=tuple(self.on_disk.values()))
        self._note(self.recorded - {key})

    def stop(self) -> None:
        """End every download within a chunk, even if no bytes come any more."""
        self._hub.fetcher.stop()
        self._hub.client.break_off()

    def _note(self, contents: frozenset[str]) -> None:
        if self._record is None or contents == self.recorded:
            return
        self.recorded = contents
        if contents:
            write_whole(self._record, json.dumps(sorted(contents), indent=1))
            return
        try:
            self._record.unlink(missing_ok=True)
        except OSError as error:
            raise not_written(self._record, error) from error


def _remote(subject: Subject) -> list[Checkpoint]:
    members = [checkpoint for checkpoint, _ in subject.members]
    return [source for c in members for source in c.sources if source.commit is not None]


def _recorded(path: Path) -> frozenset[str]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # of a damaged list nothing is evicted
        return frozenset()
    return frozenset(map(str, contents)) if isinstance(contents, list) else frozenset()


def refuse_shared_cache() -> None:
    """Refuse to remove weights from a cache whose readers on other hosts are not visible here."""
    if kind := shared_file_system(hub_cache()):
        raise MachineError(
            f"a disk budget removes weights from the cache `{hub_cache()}`, which is on a network "
            f"file system ({kind}): processes on other hosts may read them, and their locks are "
            "not visible here",
            hint="set HF_HUB_CACHE to a folder on a disk of this host, or make room for all "
            "weights and leave out `disk_budget`",
        )
