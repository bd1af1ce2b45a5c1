"""Which contents stay on the disk between two uses, and when the others are fetched and go.

A way is cut into turns, in each of which something is done with some contents: a subject is
measured, or a member is added to a running sum. Between two turns that use it a content either
stays or goes and is fetched again. Which ones stay is decided first: walking along the turns,
whatever does not fit is dropped, the one whose next use is farthest away first, and what still
fits in the end is taken back. For contents of one size, which the checkpoints of a series are,
this fetches as few bytes as can be (the keeping of intervals under a capacity is then solved by
that greedy rule); for mixed sizes the problem is NP-hard, and the tests say how far off it is on
small ones. Only then is each fetch moved ahead, into the time in which a subject is measured,
where there is room for it: fetching early never costs a byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal


@dataclass(frozen=True)
class Step:
    """One thing to do: with the content `key`, with the subject at `position`, or with both."""

    kind: Literal["check", "fetch", "add", "measure", "drop", "evict"]
    key: str = ""
    position: int = -1


@dataclass(frozen=True)
class Turn:
    """What is done at once: a subject is measured, or one of its members added to its sum."""

    position: int
    needs: tuple[str, ...] = ()
    added: str = ""  # the content of that member; none: the subject is measured
    summed: bool = False  # it is measured from its sum, which is of no use afterwards
    beside_nbytes: int = 0  # what running sums take of the disk meanwhile


def fits(turns: Sequence[Turn], nbytes: Mapping[str, int], budget: int | None) -> bool:
    """Say whether what is needed in each turn is within a budget."""
    return budget is None or all(
        turn.beside_nbytes + sum(nbytes[key] for key in turn.needs) <= budget for turn in turns
    )


@dataclass(frozen=True)
class Gap:
    """The turns between two uses of a content, in which it stays on the disk or does not."""

    key: str
    start: int  # the turn of the use before; -1: it lies there as the way begins
    end: int  # the turn of the next use
    nbytes: int

    @property
    def turns(self) -> range:
        """The turns that lie between."""
        return range(self.start + 1, self.end)


@dataclass(frozen=True)
class Stays:
    """Which contents stay on the disk over which turns."""

    turns: tuple[Turn, ...]
    nbytes: Mapping[str, int]  # what each content takes of the budget
    cached: frozenset[str] = frozenset()  # never goes
    present: frozenset[str] = frozenset()  # lies there as it begins, and may go
    budget: int | None = None

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Every gap between two uses."""
        uses: dict[str, list[int]] = {}
        for number, turn in enumerate(self.turns):
            for key in turn.needs:
                uses.setdefault(key, [-1] if key in self.present else []).append(number)
        return tuple(
            Gap(key, start, end, self.nbytes[key])
            for key, turns in uses.items()
            for start, end in pairwise(turns)
        )

    @cached_property
    def kept(self) -> frozenset[Gap]:
        """The gaps over which a content stays."""
        if self.budget is None:
            return frozenset(self.gaps)
        loads, staying = self._needed(), set(self.gaps)
        for turn in range(len(self.turns)):
            over = sorted((gap for gap in staying if turn in gap.turns), key=_farthest)
            load = loads[turn] + sum(gap.nbytes for gap in over)
            while over and load > self.budget:
                gap = over.pop()
                staying.discard(gap)
                load -= gap.nbytes
        return self._with_what_still_fits(staying)

    def _with_what_still_fits(self, staying: set[Gap]) -> frozenset[Gap]:
        loads = self._loads(staying)
        for gap in sorted(set(self.gaps) - staying, key=lambda gap: (-gap.nbytes, gap.start)):
            if self._fits(loads, gap.turns, gap.nbytes):
                staying.add(gap)
                _add(loads, gap.turns, gap.nbytes)
        return frozenset(staying)

    @property
    def cost(self) -> tuple[bool, int]:
        """What is wrong with a way, worst first: that it does not fit, and the bytes it fetches."""
        fetched = sum(self.nbytes[key] for keys in self._lacking() for key in keys)
        return not fits(self.turns, self.nbytes, self.budget), fetched

    def steps(self) -> Iterator[Step]:
        """Yield the steps, every fetch as early as there is room for it."""
        leaving, ahead, checks = self._leaving(), self._ahead(), self._checks()
        yield from (Step("evict", key) for key in leaving[-1])
        for number, turn in enumerate(self.turns):
            if number == 0:
                yield from (Step("check", key) for key in checks.get(0, ()))
            yield from (Step("fetch", key) for key in ahead[number, "own"])
            yield from (Step("check", key) for key in checks.get(number + 1, ()))
            yield from (Step("fetch", key) for key in ahead[number, "next"])
            yield Step("add" if turn.added else "measure", turn.added, turn.position)
            if turn.summed:
                yield Step("drop", position=turn.position)
            yield from (Step("evict", key) for key in leaving[number])

    def _lacking(self) -> list[list[str]]:
        """Return, turn by turn, the contents that have to come before it."""
        stayed = {(gap.key, gap.end) for gap in self.kept}
        return [
            [k for k in self._uncached(turn) if (k, turn) not in stayed]
            for turn in range(len(self.turns))
        ]

    def _ahead(self) -> dict[tuple[int, str], list[str]]:
        """Return what is fetched for a turn itself, and what for later ones while it is on.

        Only for the next turn that lacks something, and only while a subject is measured: whoever
        fetches further ahead fills the disk and gains nothing.
        """
        ahead: dict[tuple[int, str], list[str]] = {
            (turn, when): [] for turn in range(len(self.turns)) for when in ("own", "next")
        }
        loads, before = self._loads(self.kept), 0
        for turn, keys in enumerate(self._lacking()):
            for key in keys:
                earliest = max(before, self._last_use(key, turn) + 1)
                moments = (
                    early
                    for early in range(earliest, turn)
                    if not self.turns[early].added
                    and self._fits(loads, range(early, turn), self.nbytes[key])
                )
                early = next(moments, turn)
                _add(loads, range(early, turn), self.nbytes[key])
                ahead[early, "own" if early == turn else "next"].append(key)
            if keys:
                before = turn
        return ahead

    def _last_use(self, key: str, turn: int) -> int:
        return max(
            (gap.start for gap in self.gaps if (gap.key, gap.end) == (key, turn)), default=-1
        )

    def _checks(self) -> dict[int, list[str]]:
        """Return at which turn contents that lie there already are used for the first time."""
        checks: dict[int, list[str]] = {}
        seen: set[str] = set()
        stayed = {gap.key for gap in self.kept if gap.start == -1}
        for number, turn in enumerate(self.turns):
            for key in turn.needs:
                if key not in seen and (key in self.cached or key in stayed):
                    checks.setdefault(number, []).append(key)
                seen.add(key)
        return checks

    def _leaving(self) -> dict[int, list[str]]:
        """Return what goes after each turn, and after turn -1 what goes before the first."""
        leaving: dict[int, list[str]] = {turn: [] for turn in range(-1, len(self.turns))}
        if self.budget is None:
            return leaving
        staying = {(gap.key, gap.start) for gap in self.kept}
        leaving[-1] = sorted(key for key in self.present if (key, -1) not in staying)
        for turn in range(len(self.turns)):
            leaving[turn] = [k for k in self._uncached(turn) if (k, turn) not in staying]
        return leaving

    def _uncached(self, turn: int) -> list[str]:
        return [k for k in self.turns[turn].needs if k not in self.cached]

    def _needed(self) -> list[int]:
        return [
            turn.beside_nbytes + sum(self.nbytes[key] for key in self._uncached(number))
            for number, turn in enumerate(self.turns)
        ]

    def _loads(self, staying: Iterable[Gap]) -> list[int]:
        loads = self._needed()
        for gap in staying:
            _add(loads, gap.turns, gap.nbytes)
        return loads

    def _fits(self, loads: Sequence[int], turns: range, nbytes: int) -> bool:
        budget = self.budget
        return budget is None or all(loads[turn] + nbytes <= budget for turn in turns)


def _farthest(gap: Gap) -> tuple[bool, int, int, str]:
    """Order gaps by how soon they may be dropped, last first: never one that makes no room."""
    return (gap.nbytes > 0, gap.end, gap.nbytes, gap.key)


def _add(loads: list[int], turns: range, nbytes: int) -> None:
    for turn in turns:
        loads[turn] += nbytes
