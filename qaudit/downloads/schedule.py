"""In which order weights are downloaded and evicted, within a disk budget.

Subjects keep the order of their series; a soup comes right behind its last member. A content
(the weights of a checkpoint, by hash) is evicted after its last use, or before that where room
is needed and another use is nearer. The next content is fetched while a subject is measured, if
there is room. Without a budget nothing is evicted or moved.

A soup whose members do not fit on the disk together is added up in a running sum: each member
is added when its own turn comes, in the soup's order, and otherwise right before the soup.

Contents that were in the cache before cost nothing and are never evicted. Given up: parts that
two contents share are counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from qaudit.core.sizes import size, typed_size
from qaudit.errors import MachineError


@dataclass(frozen=True)
class Step:
    """One thing to do with the content `key`, with the subject at `position`, or with both."""

    kind: Literal["check", "fetch", "add", "measure", "drop", "evict"]
    key: str = ""
    position: int = -1


@dataclass(frozen=True)
class Turn:
    """One subject is measured, or one of its members is added to its running sum."""

    position: int
    needs: tuple[str, ...] = ()
    added: str = ""  # the content of that member; empty: the subject is measured
    summed: bool = False  # it is measured from its running sum, which is dropped afterwards
    sums_nbytes: int = 0  # what running sums take of the disk meanwhile


@dataclass(frozen=True)
class SumSize:
    """The members of a running sum, and what it takes of the disk."""

    members: tuple[str, ...]  # contents in the order in which they are added
    growing_nbytes: int
    merged_nbytes: int  # once all are added
    begun: bool = False  # it is on the disk already, with so many members:
    added: int = 0

    @property
    def missing(self) -> tuple[str, ...]:
        return self.members[self.added :]

    @property
    def nbytes(self) -> int:
        if not self.begun:
            return 0
        return self.growing_nbytes if self.missing else self.merged_nbytes


@dataclass(frozen=True)
class DownloadSchedule:
    """The contents that subjects need, their sizes, and what is on the disk at the beginning."""

    needs: tuple[tuple[str, ...], ...]
    nbytes: Mapping[str, int]
    cached: frozenset[str] = frozenset()
    present: frozenset[str] = frozenset()  # downloaded by an earlier run: counts, may be evicted
    budget: int | None = None
    labels: tuple[str, ...] = ()
    sums: Mapping[int, SumSize] = field(default_factory=dict)  # of soups that can be summed

    @cached_property
    def summed(self) -> Mapping[int, SumSize]:
        """The running sums of those soups whose members do not fit on the disk together."""
        return {
            position: sum_size
            for position, sum_size in self.sums.items()
            if self._is_too_large(position) or (sum_size.begun and not sum_size.missing)
        }

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The positions of the subjects: as given, with each soup behind its last member."""
        self._must_fit()
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

    def settled(self) -> DownloadSchedule:
        """Drop running sums of an earlier run that are of no use or take the room of others."""
        useful = self._without({p: s for p, s in self.sums.items() if p not in self.summed})
        unfinished = {p: s for p, s in useful.summed.items() if s.missing}
        for dropped in ({}, unfinished):
            schedule = useful._without(dropped)
            if schedule._fits(schedule._turns(schedule.order)):
                return schedule
        return useful._without(useful.sums)

    def steps(self, order: Sequence[int] | None = None) -> tuple[Step, ...]:
        """Return the steps of measuring the subjects at these positions, or all."""
        turns = self._turns(self.order if order is None else order)
        return tuple(_Walk(self, turns).steps())

    def peak_nbytes(self, steps: Iterable[Step]) -> int:
        """Return the most bytes on the disk at once, without those that were cached before."""
        sums = {position: sum_size.nbytes for position, sum_size in self.summed.items()}
        missing = {position: len(one.missing) for position, one in self.summed.items()}
        weights = sum(self.nbytes[key] for key in self.present)
        peak = weights + sum(sums.values())
        for step in steps:
            if step.kind == "fetch":
                weights += self.nbytes[step.key]
            elif step.kind == "evict":
                weights -= self.nbytes[step.key]
            elif step.kind == "add":
                sums[step.position] = self.summed[step.position].growing_nbytes
            elif step.kind == "drop":
                sums[step.position] = 0
            peak = max(peak, weights + sum(sums.values()))
            if step.kind == "add":
                missing[step.position] -= 1
                if not missing[step.position]:
                    sums[step.position] = self.summed[step.position].merged_nbytes
        return peak

    def fetched_nbytes(self, steps: Iterable[Step]) -> int:
        return sum(self.nbytes[step.key] for step in steps if step.kind == "fetch")

    def weight(self, key: str) -> int:
        return 0 if key in self.cached else self.nbytes[key]

    def at_once_nbytes(self, position: int) -> int:
        """Return the least that a subject takes of a budget at its worst moment."""
        together = sum(map(self.weight, self.needs[position]))
        if position not in self.sums:
            return together
        one = self.sums[position]
        largest = max((self.weight(key) for key in one.missing if key in self.nbytes), default=0)
        return min(together, largest + (one.growing_nbytes if one.missing else one.merged_nbytes))

    def _is_too_large(self, position: int) -> bool:
        needed = sum(map(self.weight, self.needs[position]))
        return self.budget is not None and needed > self.budget

    def _without(self, dropped: Mapping[int, SumSize]) -> DownloadSchedule:
        fresh = {p: replace(sum_size, begun=False, added=0) for p, sum_size in dropped.items()}
        return replace(self, sums={**self.sums, **fresh})

    def _fits(self, turns: Iterable[Turn]) -> bool:
        return self.budget is None or all(
            turn.sums_nbytes + sum(map(self.weight, turn.needs)) <= self.budget for turn in turns
        )

    def _must_fit(self) -> None:
        if self.budget is None:
            return
        needed = {p: self.at_once_nbytes(p) for p in range(len(self.needs))}
        too_large = [p for p, nbytes in needed.items() if nbytes > self.budget]
        if not too_large:
            return
        names = {p: self.labels[p] if self.labels else f"subject {p + 1}" for p in too_large}
        worst = max(too_large, key=lambda p: needed[p])
        raise MachineError(
            f"`{names[worst]}` needs {size(needed[worst])} of weights on the disk at once, "
            f"and the budget is {size(self.budget)}",
            hint=f"give `--disk-budget {typed_size(needed[worst])}`, or leave out "
            + ", ".join(f"`{name}`" for name in names.values()),
        )

    def _turns(self, order: Sequence[int]) -> list[Turn]:
        """Return what is done in turn, members of running sums added as early as fits."""
        turns = self._with_sums(
            [Turn(p, summed=True) if p in self.summed else Turn(p, self.needs[p]) for p in order]
        )
        for position in (p for p in order if p in self.summed):
            early = self._with_members(turns, position, early=True)
            fits = self._fits(early)
            turns = early if fits else self._with_members(turns, position, early=False)
        return turns

    def _with_members(self, turns: list[Turn], position: int, *, early: bool) -> list[Turn]:
        """Insert the turns in which members are added to the sum of a soup."""
        end = next(k for k, turn in enumerate(turns) if turn.position == position)
        added: dict[int, list[Turn]] = {}
        at = 0 if early else end
        for key in self.summed[position].missing:
            at = next((k for k in range(at, end) if key in turns[k].needs), end)
            needs = (key,) if key in self.nbytes else ()  # a local folder is always there
            added.setdefault(at, []).append(Turn(position, needs, key))
        return self._with_sums(
            [t for k, turn in enumerate(turns) for t in (*added.get(k, ()), turn)]
        )

    def _with_sums(self, turns: Sequence[Turn]) -> list[Turn]:
        """Set what running sums take of the disk in each turn: from their first to their last."""
        loads = [0] * len(turns)
        for position, sum_size in self.summed.items():
            own = [k for k, turn in enumerate(turns) if turn.position == position]
            if not own:  # its soup is not measured any more
                continue
            last_added = max((k for k in own if turns[k].added), default=-1)
            for k in range(0 if sum_size.begun else own[0], own[-1] + 1):
                loads[k] += sum_size.growing_nbytes if k <= last_added else sum_size.merged_nbytes
        return [replace(t, sums_nbytes=load) for t, load in zip(turns, loads, strict=True)]


class _Walk:
    """One pass through the turns; each fits the budget by itself."""

    def __init__(self, schedule: DownloadSchedule, turns: Sequence[Turn]) -> None:
        self._schedule, self._turns = schedule, turns
        self._nbytes, self._cached = schedule.nbytes, schedule.cached
        # What is cached is never evicted; what is present may be.
        self._disk, self._unchecked = set(schedule.present), schedule.cached | schedule.present

    def steps(self) -> Iterator[Step]:
        for number, turn in enumerate(self._turns):
            yield from self._evict_unused(number)
            yield from self._make_room(turn, number)
            yield from self._checks(turn)
            yield from map(self._fetch, self._missing(turn))
            if not turn.added:
                yield from self._ahead(number)
            yield Step("add" if turn.added else "measure", turn.added, turn.position)
            if turn.summed:
                yield Step("drop", position=turn.position)
        yield from self._evict_unused(len(self._turns))

    def _evict_unused(self, number: int) -> Iterator[Step]:
        if self._schedule.budget is not None:
            unused = [k for k in self._disk if self._next_use(k, number) == len(self._turns)]
            yield from map(self._evict, sorted(unused))

    def _make_room(self, turn: Turn, number: int) -> Iterator[Step]:
        """Evict what is used last, until there is room for what the turn lacks."""
        needed = sum(self._nbytes[key] for key in self._missing(turn))
        while self._room(turn.sums_nbytes) < needed:
            others = sorted(self._disk - set(turn.needs))
            yield self._evict(max(others, key=lambda k: self._next_use(k, number)))

    def _ahead(self, number: int) -> Iterator[Step]:
        """Check and fetch for the turns behind this one, up to the next that lacks something."""
        for later in range(number + 1, len(self._turns)):
            turn = self._turns[later]
            yield from self._checks(turn)
            missing = self._missing(turn)
            for key in missing:
                most = max(turn.sums_nbytes for turn in self._turns[number:later])
                if self._nbytes[key] <= self._room(most):
                    yield self._fetch(key)
            if missing:
                return

    def _checks(self, turn: Turn) -> Iterator[Step]:
        """Check what was on the disk before, when it is used for the first time."""
        for key in turn.needs:
            if key in self._unchecked and (key in self._cached or key in self._disk):
                yield Step("check", key)
            self._unchecked -= {key}

    def _fetch(self, key: str) -> Step:
        self._disk.add(key)
        return Step("fetch", key)

    def _evict(self, key: str) -> Step:
        self._disk.discard(key)
        return Step("evict", key)

    def _missing(self, turn: Turn) -> list[str]:
        return [key for key in turn.needs if key not in self._disk | self._cached]

    def _next_use(self, key: str, number: int) -> int:
        turns = range(number, len(self._turns))
        return next((k for k in turns if key in self._turns[k].needs), len(self._turns))

    def _room(self, sums_nbytes: int) -> float:
        if self._schedule.budget is None:
            return float("inf")
        return self._schedule.budget - sums_nbytes - sum(self._nbytes[key] for key in self._disk)
