"""Walk through turns with a disk of limited size: what is fetched, checked and evicted when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


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


class Walk:
    """One pass through the turns; each fits the budget by itself."""

    def __init__(
        self,
        turns: Sequence[Turn],
        nbytes: Mapping[str, int],
        cached: frozenset[str],
        present: frozenset[str],
        budget: int | None,
    ) -> None:
        """Begin with what is on the disk: `cached` is never evicted, `present` may be."""
        self._turns, self._nbytes, self._cached, self._budget = turns, nbytes, cached, budget
        self._disk, self._unchecked = set(present), cached | present

    def steps(self) -> Iterator[Step]:
        """Yield every step, in order."""
        for number, turn in enumerate(self._turns):
            yield from self._without_use(number)
            yield from self._with_room_for(turn, number)
            yield from self._checks(turn)
            yield from self._fetches(self._missing(turn))
            if not turn.added:
                yield from self._ahead(number)
            yield Step("add" if turn.added else "measure", turn.added, turn.position)
            if turn.summed:
                yield Step("drop", position=turn.position)
        yield from self._without_use(len(self._turns))

    def _without_use(self, number: int) -> Iterator[Step]:
        """Evict what is not used from this turn on."""
        if self._budget is not None:
            unused = [k for k in self._disk if self._next_use(k, number) == len(self._turns)]
            yield from self._evictions(sorted(unused))

    def _with_room_for(self, turn: Turn, number: int) -> Iterator[Step]:
        """Evict what is used last, until what the turn lacks has room."""
        needed = sum(self._nbytes[key] for key in self._missing(turn))
        while self._room(turn.sums_nbytes) < needed:
            others = sorted(self._disk - set(turn.needs))
            yield from self._evictions([max(others, key=lambda k: self._next_use(k, number))])

    def _ahead(self, number: int) -> Iterator[Step]:
        """Check and fetch for the turns behind this one, up to the next that lacks something."""
        for later in range(number + 1, len(self._turns)):
            turn = self._turns[later]
            yield from self._checks(turn)
            missing = self._missing(turn)
            for key in missing:
                most = max(turn.sums_nbytes for turn in self._turns[number:later])
                if self._nbytes[key] <= self._room(most):
                    yield from self._fetches([key])
            if missing:
                return

    def _checks(self, turn: Turn) -> Iterator[Step]:
        """Check what was on the disk before, when it is used for the first time."""
        for key in turn.needs:
            if key in self._unchecked and (key in self._cached or key in self._disk):
                yield Step("check", key)
            self._unchecked -= {key}

    def _fetches(self, keys: Iterable[str]) -> Iterator[Step]:
        for key in keys:
            self._disk.add(key)
            yield Step("fetch", key)

    def _evictions(self, keys: Iterable[str]) -> Iterator[Step]:
        for key in keys:
            self._disk.discard(key)
            yield Step("evict", key)

    def _missing(self, turn: Turn) -> list[str]:
        return [key for key in turn.needs if key not in self._disk | self._cached]

    def _next_use(self, key: str, number: int) -> int:
        turns = range(number, len(self._turns))
        return next((k for k in turns if key in self._turns[k].needs), len(self._turns))

    def _room(self, sums_nbytes: int) -> float:
        if self._budget is None:
            return float("inf")
        return self._budget - sums_nbytes - sum(self._nbytes[key] for key in self._disk)
