"""In which order weights come and go, so that what is on the disk stays within a budget.

Each subject needs some contents: a checkpoint one, a soup all of its members at once. Where the
budget does not hold them at once and the soup is a sum, its members are added to one on the disk
while they pass by (`turns`). Which contents stay between two uses, and when the others come, is
decided for the turns that this makes (`stays`).

Subjects may be measured in another order if that saves bytes: soups right behind their members,
or members right before their soup. Of three such orders and the given one the cheapest is taken,
and the given one where they are equal. Without a budget nothing is evicted or moved.

Contents that are cached already are the user's: they cost nothing and never go. They are only
checked, as everything is before it is used. Given up: parts that two contents share are counted
twice, and orders beyond those four are not tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from qaudit.downloads.stays import Stays, Step
from qaudit.downloads.turns import Sum, turns_of
from qaudit.errors import MachineError

__all__ = ["Step", "Sum", "Trip", "fetched_nbytes", "itinerary", "peak_nbytes"]


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
    steps: Iterable[Step],
    nbytes: Mapping[str, int],
    present: Collection[str] = (),
    sums: Mapping[int, Sum] | None = None,
) -> int:
    """Return the most bytes that are on the disk at once, beside those of the user."""
    steps, sums = tuple(steps), sums or {}
    lying = {position: summed.nbytes for position, summed in sums.items()}
    coming = Counter(step.position for step in steps if step.kind == "add")
    there = sum(nbytes[key] for key in present)
    peak = there + sum(lying.values())
    for step in steps:
        if step.kind == "fetch":
            there += nbytes[step.key]
        elif step.kind == "evict":
            there -= nbytes[step.key]
        elif step.kind == "add":
            lying[step.position] = sums[step.position].growing_nbytes
        elif step.kind == "drop":
            lying[step.position] = 0
        peak = max(peak, there + sum(lying.values()))
        if step.kind == "add":
            coming[step.position] -= 1
            if not coming[step.position]:
                lying[step.position] = sums[step.position].merged_nbytes
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
    sums: Mapping[int, Sum] = field(default_factory=dict)  # of the soups that can be summed up

    @cached_property
    def summed(self) -> Mapping[int, Sum]:
        """The sums of those soups whose members do not lie on the disk together."""
        return {
            position: one
            for position, one in self.sums.items()
            if self._is_too_large(position) or (one.begun and not one.lacking)
        }

    def settled(self) -> Trip:
        """Leave those sums of an earlier trip that nobody needs or that stand in the way."""
        trip = self._without({p: one for p, one in self.sums.items() if p not in self.summed})
        for dropped in ({}, {p: one for p, one in trip.summed.items() if one.lacking}, trip.sums):
            left = trip._without(dropped)
            if not left._stays(left.order()).cost[0]:
                return left
        return trip._without(trip.sums)

    def order(self) -> tuple[int, ...]:
        """Return the positions of the subjects in the order that fetches the fewest bytes."""
        self._must_fit()
        given = tuple(range(len(self.needs)))
        if self.budget is None:
            return given
        return min(self._orders(given), key=lambda order: self._stays(order).cost)

    def steps(self, order: Sequence[int]) -> tuple[Step, ...]:
        """Return the steps of measuring the subjects at these positions in this order."""
        self._must_fit()
        return tuple(self._stays(order).steps())

    def weighs(self, key: str) -> int:
        """Return the bytes a content takes of the budget."""
        return 0 if key in self.cached else self.nbytes[key]

    def at_once_nbytes(self, position: int) -> int:
        """Return the least that a subject takes of a budget at its worst moment."""
        together = sum(map(self.weighs, self.needs[position]))
        if position not in self.sums:
            return together
        return min(together, self.passing_nbytes(position))

    def passing_nbytes(self, position: int) -> int:
        """Return what a soup's sum takes with the largest member that is still to be added."""
        one = self.sums[position]
        lacking = [self.weighs(key) for key in one.lacking if key in self.nbytes]
        return max(lacking, default=0) + (one.growing_nbytes if one.lacking else one.merged_nbytes)

    def _is_too_large(self, position: int) -> bool:
        needed = sum(map(self.weighs, self.needs[position]))
        return self.budget is not None and needed > self.budget

    def _without(self, dropped: Mapping[int, Sum]) -> Trip:
        """Return the trip as if these sums had not been begun."""
        fresh = {p: replace(one, begun=False, added=0) for p, one in dropped.items()}
        return replace(self, sums={**self.sums, **fresh})

    @cached_property
    def _weights(self) -> dict[str, int]:
        return {key: self.weighs(key) for key in self.nbytes}

    def _stays(self, order: Sequence[int]) -> Stays:
        """Return what stays on the cheapest way of measuring subjects in an order."""
        summed = {position: one for position, one in self.summed.items() if position in order}
        ways = [
            turns_of(order, self.needs, summed, self._weights, self.budget, passing=passing)
            for passing in ((True, False) if summed else (True,))
        ]
        return min(
            (Stays(way, self._weights, self.cached, self.present, self.budget) for way in ways),
            key=lambda stays: stays.cost,
        )

    def _must_fit(self) -> None:
        """Refuse a budget that does not hold what one subject needs at once."""
        if self.budget is None:
            return
        needed = {p: self.at_once_nbytes(p) for p in range(len(self.needs))}
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


def _at_least(nbytes: int) -> str:
    """Print a size that is not smaller than so many bytes, as `--disk-budget` takes it."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= scale:
            tenths = -(-nbytes * 10 // scale)
            return f"{tenths / 10:.1f}{unit}"
    return f"{nbytes}B"
