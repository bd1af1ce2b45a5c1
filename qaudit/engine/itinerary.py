"""In which order weights come and go, so that what is on the disk stays within a budget.

Each subject needs some contents (a checkpoint one, a soup all of its members at once). Between
two subjects that need it a content either stays on the disk or goes and is fetched again. Which
ones stay is decided first: walking along the subjects, whatever does not fit is dropped, the one
whose next use is farthest away first, and what still fits in the end is taken back. For contents
of one size, which the checkpoints of a series are, this fetches as few bytes as can be (the
keeping of intervals under a capacity is then solved by that greedy rule); for mixed sizes the
problem is NP-hard, and the tests say how far off it is on small ones. Only then is each fetch
moved ahead, into the time in which the subject before is measured, where there is room for it:
fetching early never costs a byte.

Subjects may be measured in another order if that saves bytes: soups right behind their members,
or members right before their soup. Of three such orders and the given one the cheapest is taken,
and the given one where they are equal. Without a budget nothing is evicted or moved.

Contents that are cached already are the user's: they cost nothing and never go. They are only
checked, as everything is before it is used. Given up: parts that two contents share are counted
twice, and orders beyond those four are not tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from qaudit.errors import MachineError


@dataclass(frozen=True)
class Step:
    """One thing to do: with the content `key`, or with the subject at `position`."""

    kind: Literal["check", "fetch", "measure", "evict"]
    key: str = ""
    position: int = -1


def itinerary(
    needs: Sequence[Sequence[str]],
    nbytes: Mapping[str, int],
    *,
    cached: Collection[str],
    budget: int | None,
    labels: Sequence[str] = (),
) -> tuple[Step, ...]:
    """Return every step of measuring subjects that need such contents, in order."""
    trip = Trip(
        tuple(tuple(dict.fromkeys(keys)) for keys in needs),
        nbytes,
        cached=frozenset(cached),
        budget=budget,
        labels=tuple(labels),
    )
    return trip.steps(trip.order())


def peak_nbytes(
    steps: Iterable[Step], nbytes: Mapping[str, int], present: Collection[str] = ()
) -> int:
    """Return the most bytes that are on the disk at once, beside those of the user."""
    there = sum(nbytes[key] for key in present)
    peak = there
    for step in steps:
        if step.kind == "fetch":
            there += nbytes[step.key]
        elif step.kind == "evict":
            there -= nbytes[step.key]
        peak = max(peak, there)
    return peak


def fetched_nbytes(steps: Iterable[Step], nbytes: Mapping[str, int]) -> int:
    """Return how many bytes are fetched, the same ones twice where they come twice."""
    return sum(nbytes[step.key] for step in steps if step.kind == "fetch")


@dataclass(frozen=True)
class Trip:
    """What is needed by whom, how large it is, and what lies on the disk as it begins."""

    needs: tuple[tuple[str, ...], ...]
    nbytes: Mapping[str, int]
    cached: frozenset[str] = frozenset()
    present: frozenset[str] = frozenset()  # brought by an earlier trip: counts, and may go
    budget: int | None = None
    labels: tuple[str, ...] = ()

    def order(self) -> tuple[int, ...]:
        """Return the positions of the subjects in the order that fetches the fewest bytes."""
        self._must_fit()
        given = tuple(range(len(self.needs)))
        if self.budget is None:
            return given
        return min(self._orders(given), key=lambda order: _Stays(self, order).fetched_nbytes)

    def steps(self, order: Sequence[int]) -> tuple[Step, ...]:
        """Return the steps of measuring the subjects at these positions in this order."""
        self._must_fit()
        return tuple(_Stays(self, tuple(order)).steps())

    def weighs(self, key: str) -> int:
        """Return the bytes a content takes of the budget."""
        return 0 if key in self.cached else self.nbytes[key]

    def _must_fit(self) -> None:
        """Refuse a budget that does not hold what one subject needs at once."""
        if self.budget is None:
            return
        needed = {p: sum(map(self.weighs, keys)) for p, keys in enumerate(self.needs)}
        too_large = [p for p, nbytes in needed.items() if nbytes > self.budget]
        if not too_large:
            return
        worst = max(too_large, key=lambda p: needed[p])
        what = "leave out " + ", ".join(f"`{self._name(p)}`" for p in too_large)
        raise MachineError(
            f"`{self._name(worst)}` needs {_at_least(needed[worst])} of weights on the disk at "
            f"once, and the budget is {_at_least(self.budget)}",
            hint=f"give `--disk-budget {_at_least(needed[worst])}`, or {what}",
        )

    def _name(self, position: int) -> str:
        return self.labels[position] if self.labels else f"subject {position + 1}"

    def _orders(self, given: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the given order, and others in which soups and their members are neighbours."""
        alone = {keys[0]: p for p, keys in enumerate(self.needs) if len(keys) == 1}
        soups = {
            p: [alone[key] for key in keys if key in alone]
            for p, keys in enumerate(self.needs)
            if len(keys) > 1
        }
        behind = {soup: max(members, default=soup) for soup, members in soups.items()}
        yield given
        if soups:
            yield tuple(sorted(given, key=lambda p: (behind.get(p, p), p in soups, p)))
            yield _gathered(given, soups)
            yield _gathered(sorted(given, key=lambda p: (behind.get(p, p), p in soups, p)), soups)


def _gathered(order: Sequence[int], soups: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Move every member of a soup right before the first soup that holds it."""
    held_back = {member for members in soups.values() for member in members}
    found: dict[int, None] = {}
    place = {position: turn for turn, position in enumerate(order)}
    for position in order:
        members = sorted(soups.get(position, ()), key=place.__getitem__)
        found.update(dict.fromkeys(members))
        if position not in held_back:
            found[position] = None
    return tuple(found)


@dataclass(frozen=True)
class _Gap:
    """The turns between two uses of a content, in which it stays on the disk or does not."""

    key: str
    start: int  # the turn of the use before; -1: it lies there as the trip begins
    end: int  # the turn of the next use
    nbytes: int

    @property
    def turns(self) -> range:
        """The turns that lie between."""
        return range(self.start + 1, self.end)


@dataclass(frozen=True)
class _Stays:
    """Which contents stay on the disk over which turns, for subjects in a given order."""

    trip: Trip
    order: tuple[int, ...]

    @cached_property
    def gaps(self) -> tuple[_Gap, ...]:
        """Every gap between two uses."""
        uses: dict[str, list[int]] = {}
        for turn, position in enumerate(self.order):
            for key in self.trip.needs[position]:
                uses.setdefault(key, [-1] if key in self.trip.present else []).append(turn)
        return tuple(
            _Gap(key, start, end, self.trip.weighs(key))
            for key, turns in uses.items()
            for start, end in pairwise(turns)
        )

    @cached_property
    def kept(self) -> frozenset[_Gap]:
        """The gaps over which a content stays."""
        if self.trip.budget is None:
            return frozenset(self.gaps)
        loads, staying = self._needed(), set(self.gaps)
        for turn in range(len(self.order)):
            over = sorted((gap for gap in staying if turn in gap.turns), key=_farthest)
            load = loads[turn] + sum(gap.nbytes for gap in over)
            while load > self.trip.budget:
                gap = over.pop()
                staying.discard(gap)
                load -= gap.nbytes
        return self._with_what_still_fits(staying)

    def _with_what_still_fits(self, staying: set[_Gap]) -> frozenset[_Gap]:
        loads = self._loads(staying)
        for gap in sorted(set(self.gaps) - staying, key=lambda gap: (-gap.nbytes, gap.start)):
            if self._fits(loads, gap.turns, gap.nbytes):
                staying.add(gap)
                _add(loads, gap.turns, gap.nbytes)
        return frozenset(staying)

    @property
    def fetched_nbytes(self) -> int:
        """The bytes that are fetched, whenever that happens."""
        return sum(self.trip.weighs(key) for keys in self._lacking() for key in keys)

    def steps(self) -> Iterator[Step]:
        """Yield the steps, every fetch as early as there is room for it."""
        leaving, ahead, checks = self._leaving(), self._ahead(), self._checks()
        yield from (Step("evict", key) for key in leaving[-1])
        for turn, position in enumerate(self.order):
            if turn == 0:
                yield from (Step("check", key) for key in checks.get(0, ()))
            yield from (Step("fetch", key) for key in ahead[turn, "own"])
            yield from (Step("check", key) for key in checks.get(turn + 1, ()))
            yield from (Step("fetch", key) for key in ahead[turn, "next"])
            yield Step("measure", position=position)
            yield from (Step("evict", key) for key in leaving[turn])

    def _lacking(self) -> list[list[str]]:
        """Return, turn by turn, the contents that have to come before it."""
        stayed = {(gap.key, gap.end) for gap in self.kept}
        return [
            [k for k in self._uncached(turn) if (k, turn) not in stayed]
            for turn in range(len(self.order))
        ]

    def _ahead(self) -> dict[tuple[int, str], list[str]]:
        """Return what is fetched for a turn itself, and what for later ones while it is on.

        Only for the next turn that lacks something: whoever fetches further ahead fills the disk
        and gains nothing.
        """
        ahead: dict[tuple[int, str], list[str]] = {
            (turn, when): [] for turn in range(len(self.order)) for when in ("own", "next")
        }
        loads, before = self._loads(self.kept), 0
        for turn, keys in enumerate(self._lacking()):
            for key in keys:
                earliest = max(before, self._last_use(key, turn) + 1)
                moments = (
                    early
                    for early in range(earliest, turn)
                    if self._fits(loads, range(early, turn), self.trip.weighs(key))
                )
                early = next(moments, turn)
                _add(loads, range(early, turn), self.trip.weighs(key))
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
        for turn, position in enumerate(self.order):
            for key in self.trip.needs[position]:
                if key not in seen and (key in self.trip.cached or key in stayed):
                    checks.setdefault(turn, []).append(key)
                seen.add(key)
        return checks

    def _leaving(self) -> dict[int, list[str]]:
        """Return what goes after each turn, and after turn -1 what goes before the first."""
        leaving: dict[int, list[str]] = {turn: [] for turn in range(-1, len(self.order))}
        if self.trip.budget is None:
            return leaving
        staying = {(gap.key, gap.start) for gap in self.kept}
        leaving[-1] = sorted(key for key in self.trip.present if (key, -1) not in staying)
        for turn in range(len(self.order)):
            leaving[turn] = [k for k in self._uncached(turn) if (k, turn) not in staying]
        return leaving

    def _uncached(self, turn: int) -> list[str]:
        return [k for k in self.trip.needs[self.order[turn]] if k not in self.trip.cached]

    def _needed(self) -> list[int]:
        return [sum(map(self.trip.weighs, self._uncached(t))) for t in range(len(self.order))]

    def _loads(self, staying: Iterable[_Gap]) -> list[int]:
        loads = self._needed()
        for gap in staying:
            _add(loads, gap.turns, gap.nbytes)
        return loads

    def _fits(self, loads: Sequence[int], turns: range, nbytes: int) -> bool:
        budget = self.trip.budget
        return budget is None or all(loads[turn] + nbytes <= budget for turn in turns)


def _farthest(gap: _Gap) -> tuple[bool, int, int, str]:
    """Order gaps by how soon they may be dropped, last first: never one that makes no room."""
    return (gap.nbytes > 0, gap.end, gap.nbytes, gap.key)


def _add(loads: list[int], turns: range, nbytes: int) -> None:
    for turn in turns:
        loads[turn] += nbytes


def _at_least(nbytes: int) -> str:
    """Print a size that is not smaller than so many bytes, as `--disk-budget` takes it."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= scale:
            tenths = -(-nbytes * 10 // scale)
            return f"{tenths / 10:.1f}{unit}"
    return f"{nbytes}B"
