"""In which order weights are downloaded and evicted, within a disk budget.

Subjects keep the order of their series; a soup comes right behind its last member. A content
(the weights of a checkpoint, by hash) is evicted after its last use, or before that where room
is needed and another use is nearer. The next content is fetched while a subject is measured, if
there is room. Without a budget nothing is evicted or moved.

Contents that were in the cache before cost nothing and are never evicted. Given up: parts that
two contents share are counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from qaudit.checkpoints.stamps import hub_cache
from qaudit.errors import MachineError
from qaudit.support.keys import first_of
from qaudit.support.sizes import size, typed_size
from qaudit.types import Subject


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
        return tuple(_Walk(self, self.order if order is None else order).steps())

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

    def weight(self, key: str) -> int:
        return 0 if key in self.cached else self.nbytes[key]

    def at_once_nbytes(self, position: int) -> int:
        return sum(map(self.weight, self.needs[position]))


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
    needed = {s: schedule.at_once_nbytes(place) for place, s in enumerate(subjects)}
    too_large = [s for s in subjects if needed[s] > budget - texts_nbytes]
    if not too_large:
        return
    worst = max(too_large, key=lambda s: needed[s])
    weights = [schedule.weight(key) for key in schedule.needs[subjects.index(worst)]]
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


class _Walk:
    """One pass through the subjects at these positions; each fits the budget by itself."""

    def __init__(self, schedule: DownloadSchedule, positions: Sequence[int]) -> None:
        self._schedule, self._positions = schedule, positions
        self._needs = [schedule.needs[position] for position in positions]
        self._nbytes, self._cached = schedule.nbytes, schedule.cached
        # What is cached is never evicted; what is present may be.
        self._disk, self._unchecked = set(schedule.present), schedule.cached | schedule.present

    def steps(self) -> Iterator[Step]:
        for number, position in enumerate(self._positions):
            needs = self._needs[number]
            yield from self._evict_unused(number)
            yield from self._make_room(needs, number)
            yield from self._checks(needs)
            yield from map(self._fetch, self._missing(needs))
            yield from self._ahead(number)
            yield Step("measure", position=position)
        yield from self._evict_unused(len(self._needs))

    def _evict_unused(self, number: int) -> Iterator[Step]:
        if self._schedule.budget is not None:
            unused = [k for k in self._disk if self._next_use(k, number) == len(self._needs)]
            yield from map(self._evict, sorted(unused))

    def _make_room(self, needs: Sequence[str], number: int) -> Iterator[Step]:
        """Evict what is used last, until there is room for what a subject lacks."""
        nbytes = sum(self._nbytes[key] for key in self._missing(needs))
        while self._room() < nbytes:
            evictable = sorted(self._disk - set(needs))
            yield self._evict(max(evictable, key=lambda k: self._next_use(k, number)))

    def _ahead(self, number: int) -> Iterator[Step]:
        """Check and fetch for the subjects behind this one, up to the next that lacks something."""
        for needs in self._needs[number + 1 :]:
            yield from self._checks(needs)
            missing = self._missing(needs)
            yield from (self._fetch(key) for key in missing if self._nbytes[key] <= self._room())
            if missing:
                return

    def _checks(self, needs: Sequence[str]) -> Iterator[Step]:
        """Check what was on the disk before, when it is used for the first time."""
        for key in needs:
            if key in self._unchecked and (key in self._cached or key in self._disk):
                yield Step("check", key)
            self._unchecked -= {key}

    def _fetch(self, key: str) -> Step:
        self._disk.add(key)
        return Step("fetch", key)

    def _evict(self, key: str) -> Step:
        self._disk.discard(key)
        return Step("evict", key)

    def _missing(self, needs: Sequence[str]) -> list[str]:
        return [key for key in needs if key not in self._disk | self._cached]

    def _next_use(self, key: str, number: int) -> int:
        later = range(number, len(self._needs))
        return next((k for k in later if key in self._needs[k]), len(self._needs))

    def _room(self) -> float:
        if self._schedule.budget is None:
            return float("inf")
        return self._schedule.budget - sum(self._nbytes[key] for key in self._disk)
