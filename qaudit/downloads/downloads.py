"""Weights of the Hub: downloaded before their subject is measured, evicted afterwards.

Subjects keep the order of their series; a soup comes right behind its last member. A content
(the weights of a checkpoint, by hash) is evicted after its last use, or before that where room
is needed and another use is nearer. The next content is fetched while a subject is measured, if
there is room. Without a budget nothing is evicted or moved. Bytes are counted by content, not by
checkpoint: two names for the same weights are fetched once, and `folder` returns where they are.

Contents that were in the cache before cost nothing and are never evicted. Given up: parts that
two contents share are counted twice.

A budget is for what a scan adds to the disk. A scan that is killed leaves weights behind; the next
one counts and evicts them, as they are recorded beside the results before their first byte comes.

A plan has the traffic: the bytes to fetch, those that come twice because the budget does not hold
them, what is cached already, and the peak. Without a budget a scan may use the free space less a
reserve of a tenth, at most 10 GB. Texts are fetched first and stay, so they come off the budget for
weights.

One thread follows the schedule: it fetches, waits until a subject is measured, evicts, and is a
subject ahead of the engine where the disk budget allows it. `ready` waits until every file of a
subject is on the disk and checked.

A content that cannot be had ends the subjects that need it and nothing else; the remaining steps
are scheduled anew without them. A Hub that does not answer, or a full disk, ends the scan after
everything on the disk has been measured. The bytes that came are kept for the next run.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from qaudit.checkpoints.stamps import hub_cache, own_folder, text_path
from qaudit.errors import HubError, MachineError, SourceError, UnreachableError, not_written
from qaudit.host import free_disk_nbytes, shared_file_system
from qaudit.hub import Hub
from qaudit.hub.cache import file_size
from qaudit.support.keys import first_of
from qaudit.support.sizes import size, typed_size
from qaudit.types import Checkpoint, Ref, Subject, TextFile, Traffic
from qaudit.whole import write_whole

RECORD_FILE = "fetched.json"
"""The name of the record in an output folder."""

LARGEST_RESERVE_NBYTES = 10 * 10**9


@dataclass(frozen=True)
class Step:
    """One thing to do with the content `key`, or with the subject at `position`."""

    kind: Literal["check", "fetch", "measure", "evict"]
    key: str = ""
    position: int = -1


@dataclass(frozen=True)
class DownloadSchedule:
    """The contents that subjects need, their sizes, and what is on the disk at the beginning."""

    needs: tuple[tuple[str, ...], ...]
    nbytes: Mapping[str, int]
    cached: frozenset[str] = frozenset()
    present: frozenset[str] = frozenset()  # downloaded by an earlier run: counts, may be evicted
    budget: int | None = None
    recorded: frozenset[str] = frozenset()  # downloaded by an earlier run, wholly or in part
    nbytes_here: Mapping[str, int] = field(default_factory=dict)
    checkpoints: Mapping[str, Sequence[Checkpoint]] = field(default_factory=dict)
    """Those that have a content, the one that is cheapest to fetch first."""

    @classmethod
    def of(
        cls,
        hub: Hub,
        subjects: Sequence[Subject],
        others: Sequence[Subject] = (),
        record: Path | None = None,
        budget: int | None = None,
    ) -> DownloadSchedule:
        """Look for what subjects need in the cache; `others` may name further places of it."""
        recorded, missing_of = _recorded(record), hub.fetcher.nbytes_missing
        places: dict[str, dict[Ref, Checkpoint]] = {}
        for subject in (*subjects, *others):
            for checkpoint in _remote(subject):
                places.setdefault(checkpoint.content, {})[checkpoint.ref] = checkpoint
        cheapest = {key: sorted(c.values(), key=missing_of) for key, c in places.items()}
        missing = {key: missing_of(c[0]) for key, c in cheapest.items()}
        whole = {key: c[0].nbytes for key, c in cheapest.items()}
        here = frozenset(key for key, nbytes in missing.items() if not nbytes)
        return cls(
            needs=tuple(tuple(dict.fromkeys(c.content for c in _remote(s))) for s in subjects),
            nbytes={key: whole[key] if key in recorded else n for key, n in missing.items()},
            cached=here - recorded,
            present=here & recorded,
            budget=budget,
            recorded=recorded,
            nbytes_here={key: whole[key] - nbytes for key, nbytes in missing.items()},
            checkpoints=cheapest,
        )

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The positions of the subjects: as given, with each soup behind its last member."""
        positions = range(len(self.needs))
        if self.budget is None:
            return tuple(positions)
        alone = {keys[0]: p for p, keys in enumerate(self.needs) if len(keys) == 1}

        def place(position: int) -> tuple[int, bool, int]:
            keys, is_soup = self.needs[position], len(self.needs[position]) > 1
            members = [alone[key] for key in keys if is_soup and key in alone]
            return max(members, default=position), is_soup, position

        return tuple(sorted(positions, key=place))

    def steps(self, positions: Sequence[int]) -> tuple[Step, ...]:
        """Return the steps through the subjects at these positions; each fits by itself."""
        needs = [self.needs[position] for position in positions]
        budget = float("inf") if self.budget is None else self.budget
        # What is cached is never evicted; what is present may be.
        disk, unchecked = set(self.present), set(self.cached | self.present)
        steps: list[Step] = []

        def missing(keys: Sequence[str]) -> list[str]:
            return [key for key in keys if key not in disk | self.cached]

        def room() -> float:
            return budget - sum(self.nbytes[key] for key in disk)

        def next_use(key: str, first: int) -> int:
            later = range(first, len(needs))
            return next((number for number in later if key in needs[number]), len(needs))

        def evict(key: str) -> None:
            disk.discard(key)
            steps.append(Step("evict", key))

        def provide(keys: Sequence[str]) -> bool:
            """Check what is there at its first use, fetch what has room; return if any lacked."""
            for key in keys:
                if key in unchecked & (self.cached | disk):
                    steps.append(Step("check", key))
                unchecked.discard(key)
            absent = missing(keys)
            for key in absent:
                if self.nbytes[key] <= room():
                    disk.add(key)
                    steps.append(Step("fetch", key))
            return bool(absent)

        for number, keys in enumerate([*needs, ()]):
            if self.budget is not None:
                for key in sorted(key for key in disk if next_use(key, number) == len(needs)):
                    evict(key)
            if number == len(needs):
                break
            lacking = sum(self.nbytes[key] for key in missing(keys))
            while room() < lacking:
                evict(max(sorted(disk - set(keys)), key=lambda key: next_use(key, number)))
            provide(keys)
            any(provide(ahead) for ahead in needs[number + 1 :])  # up to one that lacks something
            steps.append(Step("measure", position=positions[number]))
        return tuple(steps)

    def peak_nbytes(self, steps: Iterable[Step]) -> int:
        """Return the most bytes on the disk at once, without those that were cached before."""
        peak = weights = sum(self.nbytes[key] for key in self.present)
        for step in steps:
            if step.kind == "fetch":
                weights += self.nbytes[step.key]
            elif step.kind == "evict":
                weights -= self.nbytes[step.key]
            peak = max(peak, weights)
        return peak

    def fetched_nbytes(self, steps: Iterable[Step]) -> int:
        return sum(self.nbytes[step.key] for step in steps if step.kind == "fetch")


def _remote(subject: Subject) -> list[Checkpoint]:
    members = [checkpoint for checkpoint, _ in subject.members]
    return [source for c in members for source in c.sources if source.commit is not None]


def _recorded(path: Path | None) -> frozenset[str]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8")) if path else []
    except (OSError, ValueError, RecursionError):  # of a damaged list nothing is evicted
        return frozenset()
    return frozenset(map(str, contents)) if isinstance(contents, list) else frozenset()


def default_budget(free_nbytes: int) -> int:
    """Return how much a scan may add to the disk by default: the free space less a reserve."""
    return free_nbytes - min(LARGEST_RESERVE_NBYTES, free_nbytes // 10)


def missing_nbytes(texts: Sequence[TextFile]) -> int:
    return sum(t.nbytes for t in texts if file_size(text_path(t)) != t.nbytes)


def price_traffic(
    hub: Hub,
    subjects: Sequence[Subject],
    texts: Sequence[TextFile],
    budget_nbytes: int | None,
    free_nbytes: int,
    record: Path | None = None,
) -> Traffic:
    """Return the bytes that are fetched and the most on the disk, or refuse what cannot fit.

    Without a budget a scan keeps what it fetches if all of it fits; where it does not, what is
    free is its budget. No request is sent.
    """
    schedule = DownloadSchedule.of(hub, subjects, record=record)
    if budget_nbytes is not None:
        refuse_shared_cache()
    here, recorded = schedule.nbytes_here, schedule.recorded
    free = free_nbytes + sum(here[key] for key in here.keys() & recorded)  # which may go
    budget = min(default_budget(free) if budget_nbytes is None else budget_nbytes, free)
    texts_nbytes = missing_nbytes(texts)
    refuse_what_cannot_fit(schedule, subjects, budget, texts_nbytes, free)
    bound, steps = None, schedule.steps(schedule.order)
    if budget_nbytes is not None or schedule.peak_nbytes(steps) + texts_nbytes > budget:
        bound, schedule = budget, replace(schedule, budget=budget - texts_nbytes)
        steps = schedule.steps(schedule.order)
    begun = sum(here[key] for key in here.keys() & recorded - schedule.present)
    return Traffic(
        nbytes_to_fetch=schedule.fetched_nbytes(steps) - begun + texts_nbytes,
        nbytes_cached=sum(here.values()) + sum(text.nbytes for text in texts) - texts_nbytes,
        nbytes_disk_peak=schedule.peak_nbytes(steps) + texts_nbytes,
        nbytes_disk_free=free_nbytes,
        nbytes_disk_budget=bound,
    )


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


def refuse_what_cannot_fit(
    schedule: DownloadSchedule,
    subjects: Sequence[Subject],
    budget: int,
    texts_nbytes: int,
    free_nbytes: int,
) -> None:
    """Refuse a plan with a subject that no order of fetching and evicting makes room for."""
    if texts_nbytes > budget:
        raise MachineError(
            f"the texts take {size(texts_nbytes)} of disk and {size(budget)} may be used",
            hint=_more(texts_nbytes, free_nbytes),
        )
    sizes = [
        (s, [0 if key in schedule.cached else schedule.nbytes[key] for key in keys])
        for s, keys in zip(subjects, schedule.needs, strict=True)
    ]
    too_large = [(s, weights) for s, weights in sizes if sum(weights) > budget - texts_nbytes]
    if not too_large:
        return
    worst, weights = max(too_large, key=lambda pair: sum(pair[1]))
    needed = sum(weights)
    holding = f" for its {len(weights)} members at once" if len(weights) > 1 else ""
    beside = f" beside {size(texts_nbytes)} of text" if texts_nbytes else ""
    hint = _more(needed + texts_nbytes, free_nbytes)
    if len(too_large) < len(subjects):
        hint += f", or leave out {first_of([s.label for s, _ in too_large])}"
    raise MachineError(
        f"`{worst.label}` needs {size(needed)} of disk{holding}{beside}, "
        f"and {size(budget)} may be used",
        hint=hint,
    )


def _more(needed: int, free_nbytes: int) -> str:
    """Propose a larger budget where the disk has it, and a larger disk where it has not."""
    if needed <= free_nbytes:
        return f"give `--set disk_budget={typed_size(needed)}`: {size(free_nbytes)} are free"
    return (
        f"free {size(needed - free_nbytes)} on the disk of `{hub_cache()}`, or set HF_HUB_CACHE "
        f"to a folder with room for {size(needed)}"
    )


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
        self._hub, self._subjects, budget = hub, tuple(subjects), disk_budget_nbytes
        self._record = record if budget is not None else None
        self._schedule = DownloadSchedule(tuple(() for _ in subjects), {})
        if hub is not None:
            self._schedule = DownloadSchedule.of(hub, subjects, others, self._record, budget)
            if budget is not None:
                refuse_shared_cache()
                free = free_disk_nbytes(hub_cache())
                refuse_what_cannot_fit(self._schedule, subjects, budget, 0, free)
        self._order, self._recorded = self._schedule.order, self._schedule.recorded
        self._steps = deque(self._schedule.steps(self._order))
        here = self._schedule.cached | self._schedule.present
        self._on_disk = {key: self._schedule.checkpoints[key][0] for key in here}
        self._whole: dict[str, Future[None]] = {key: Future() for key in self._schedule.nbytes}
        self._refused = set[str]()
        self._failed_before = False  # whether the content before could not be had
        self._turn = 0  # the turns before it are over
        self._stopped = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="downloads")
        self.seconds_waited = 0.0

    @property
    def order(self) -> tuple[Subject, ...]:
        return tuple(self._subjects[position] for position in self._order)

    def folder(self, checkpoint: Checkpoint) -> Path:
        """Return where the weights of a checkpoint are, perhaps under another name for them."""
        return own_folder(self._on_disk.get(checkpoint.content, checkpoint))

    def __enter__(self) -> Downloads:
        self._advance(0)
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
        weights = [self._whole[key] for key in self._schedule.needs[position]]
        wait(weights, return_when=FIRST_EXCEPTION)
        self.seconds_waited += time.perf_counter() - began
        for content in weights:
            if content.done():
                content.result()  # raises why it could not be had
        try:
            yield
        except SourceError:
            self._advance(turn + 1)
            raise
        self._advance(turn + 1)

    def _advance(self, turn: int) -> None:
        """Let the thread take the steps that may be taken when the turns before `turn` are over."""
        self._turn = max(self._turn, turn)
        if self._hub is not None:
            self._thread.submit(self._walk, self._hub)

    def _stop(self) -> None:
        self._stopped = True
        if self._hub is not None:  # within a chunk, even if no bytes come any more
            self._hub.client.break_off()

    def _walk(self, hub: Hub) -> None:
        """Take step after step; schedule the rest anew where one cannot be taken."""
        try:
            while self._steps and not self._stopped:
                step = self._steps[0]
                if step.kind == "measure" and self._order.index(step.position) >= self._turn:
                    return
                self._steps.popleft()
                if step.kind == "evict":
                    self._whole[step.key] = Future()
                    self._evict(hub, step.key)
                elif step.kind != "measure" and not self._fetch(hub, step.key):
                    present = frozenset(self._on_disk) - self._schedule.cached
                    rest = replace(self._schedule, present=present)
                    self._steps = deque(rest.steps(self._positions_left()))
        except BaseException as error:  # noqa: BLE001 - raised to those that wait
            self._steps.clear()
            for content in self._whole.values():
                if not content.done():
                    content.set_exception(error)

    def _fetch(self, hub: Hub, key: str) -> bool:
        """Fetch a content from the first place that has it; return whether the schedule holds.

        Where the Hub answers and its files do not come, the error is of one checkpoint. After two
        in a row the scan ends, as it does where the Hub does not answer.
        """
        needed = {
            key for position in self._positions_left() for key in self._schedule.needs[position]
        }
        if self._whole[key].done() or key not in needed:
            return True
        if key not in self._schedule.cached:
            self._note(self._recorded | {key})
        failures, has_failed = list[HubError](), False
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
                failures.append(HubError(error.message, hint=hint))
                has_failed = True
            else:
                self._failed_before = False
                self._on_disk[key] = checkpoint
                self._whole[key].set_result(None)
                return True
        self._failed_before = has_failed
        self._refused.add(key)
        self._whole[key].set_exception(failures[0])
        self._evict(hub, key)
        return False

    def _evict(self, hub: Hub, key: str) -> None:
        """Remove a content from the disk, but for files that others share with it."""
        if self._schedule.budget is None or key in self._schedule.cached:
            return
        gone = self._on_disk.pop(key, None)
        for checkpoint in [gone] if gone else self._schedule.checkpoints[key]:
            hub.fetcher.evict(checkpoint, keep=tuple(self._on_disk.values()))
        self._note(self._recorded - {key})

    def _positions_left(self) -> list[int]:
        refused, needs = self._refused, self._schedule.needs
        return [p for p in self._order[self._turn :] if refused.isdisjoint(needs[p])]

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
