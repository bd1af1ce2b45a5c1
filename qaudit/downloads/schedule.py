"""In which order weights are downloaded and evicted, within a disk budget.

Subjects keep the order of their series; a soup comes right behind its last member. A content
(the weights of a checkpoint, by hash) is evicted after its last use, or before that where room
is needed and another use is nearer. The next content is fetched while a subject is measured, if
there is room. Without a budget nothing is evicted or moved.

Contents that were in the cache before cost nothing and are never evicted. Given up: parts that
two contents share are counted twice.

A budget is for what a scan adds to the disk. A scan that is killed leaves weights behind; the next
one counts and evicts them, as they are recorded beside the results before their first byte comes.

A plan has the traffic: the bytes to fetch, those that come twice because the budget does not hold
them, what is cached already, and the peak. Without a budget a scan may use the free space less a
reserve of a tenth, at most 10 GB. Texts are fetched first and stay, so they come off the budget for
weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

from qaudit.checkpoints.stamps import hub_cache, text_path
from qaudit.errors import MachineError
from qaudit.host import shared_file_system
from qaudit.hub import Hub
from qaudit.support.keys import first_of
from qaudit.support.sizes import size, typed_size
from qaudit.types import Checkpoint, Ref, Subject, TextFile, Traffic

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
        recorded = _recorded(record) if record else frozenset[str]()
        fetcher = hub.fetcher
        places: dict[str, dict[Ref, Checkpoint]] = {}
        for subject in (*subjects, *others):
            for checkpoint in _remote(subject):
                places.setdefault(checkpoint.content, {})[checkpoint.ref] = checkpoint
        cheapest = {k: sorted(c.values(), key=fetcher.nbytes_missing) for k, c in places.items()}
        missing = {key: fetcher.nbytes_missing(c[0]) for key, c in cheapest.items()}
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
            keys = self.needs[position]
            if len(keys) < 2:
                return position, False, position
            return max((alone[k] for k in keys if k in alone), default=position), True, position

        return tuple(sorted(positions, key=place))

    def steps(self, order: Sequence[int] | None = None) -> tuple[Step, ...]:
        """Return the steps through the subjects at these positions; each fits by itself."""
        return tuple(self._walk(self.order if order is None else order))

    def _walk(self, positions: Sequence[int]) -> Iterator[Step]:
        needs = [self.needs[position] for position in positions]
        # What is cached is never evicted; what is present may be.
        disk, unchecked = set(self.present), set(self.cached | self.present)

        def missing(keys: Sequence[str]) -> list[str]:
            return [key for key in keys if key not in disk | self.cached]

        budget = float("inf") if self.budget is None else self.budget

        def room() -> float:
            return budget - sum(self.nbytes[key] for key in disk)

        def use_of(key: str, first: int) -> int:
            later = range(first, len(needs))
            return next((number for number in later if key in needs[number]), len(needs))

        def evict(key: str) -> Step:
            disk.discard(key)
            return Step("evict", key)

        def fetch(key: str) -> Step:
            disk.add(key)
            return Step("fetch", key)

        def check(keys: Sequence[str]) -> Iterator[Step]:
            """Check what was on the disk before, when it is used for the first time."""
            for key in keys:
                if key in unchecked and (key in self.cached or key in disk):
                    yield Step("check", key)
                unchecked.discard(key)

        for number in range(len(needs) + 1):
            if self.budget is not None:
                yield from map(evict, sorted(k for k in disk if use_of(k, number) == len(needs)))
            if number == len(needs):
                return
            keys = needs[number]
            lacking = sum(self.nbytes[key] for key in missing(keys))
            while room() < lacking:
                uses = {key: use_of(key, number) for key in sorted(disk - set(keys))}
                yield evict(max(uses, key=uses.__getitem__))
            yield from check(keys)
            yield from map(fetch, missing(keys))
            for ahead in needs[number + 1 :]:  # up to the next subject that lacks something
                yield from check(ahead)
                absent = missing(ahead)
                yield from (fetch(key) for key in absent if self.nbytes[key] <= room())
                if absent:
                    break
            yield Step("measure", position=positions[number])

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


def _recorded(path: Path) -> frozenset[str]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # of a damaged list nothing is evicted
        return frozenset()
    return frozenset(map(str, contents)) if isinstance(contents, list) else frozenset()


def default_budget(free_nbytes: int) -> int:
    """Return how much a scan may add to the disk by default: the free space less a reserve."""
    return free_nbytes - min(LARGEST_RESERVE_NBYTES, free_nbytes // 10)


def missing_nbytes(texts: Sequence[TextFile]) -> int:
    def is_here(text: TextFile) -> bool:
        try:
            return text_path(text).stat().st_size == text.nbytes
        except OSError:
            return False

    return sum(text.nbytes for text in texts if not is_here(text))


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
    bound, steps = None, schedule.steps()
    if budget_nbytes is not None or schedule.peak_nbytes(steps) + texts_nbytes > budget:
        bound, schedule = budget, replace(schedule, budget=budget - texts_nbytes)
        steps = schedule.steps()
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
    weights_of = {
        s: [0 if key in schedule.cached else schedule.nbytes[key] for key in keys]
        for s, keys in zip(subjects, schedule.needs, strict=True)
    }
    needed = {subject: sum(weights) for subject, weights in weights_of.items()}
    too_large = [s for s in subjects if needed[s] > budget - texts_nbytes]
    if not too_large:
        return
    worst = max(too_large, key=lambda s: needed[s])
    weights = weights_of[worst]
    holding = f" for its {len(weights)} members at once" if len(weights) > 1 else ""
    beside = f" beside {size(texts_nbytes)} of text" if texts_nbytes else ""
    ways = [_more(needed[worst] + texts_nbytes, free_nbytes)]
    if len(too_large) < len(subjects):
        is_soup = len(too_large) == 1 and worst.kind == "soup"
        ways.append(f"leave out {'the soup ' * is_soup}{first_of([s.label for s in too_large])}")
        fitting = sum(nbytes <= budget - texts_nbytes for nbytes in accumulate(sorted(weights)))
        if is_soup and fitting > 1:
            ways.append(f"mix {fitting} of its {len(weights)} members")
    raise MachineError(
        f"`{worst.label}` needs {size(needed[worst])} of disk{holding}{beside}, "
        f"and {size(budget)} may be used",
        hint=", or ".join(ways),
    )


def _more(needed: int, free_nbytes: int) -> str:
    """Propose a larger budget where the disk has it, and a larger disk where it has not."""
    if needed <= free_nbytes:
        return f"give `--set disk_budget={typed_size(needed)}`: {size(free_nbytes)} are free"
    return (
        f"free {size(needed - free_nbytes)} on the disk of `{hub_cache()}`, or set HF_HUB_CACHE "
        f"to a folder with room for {size(needed)}"
    )
