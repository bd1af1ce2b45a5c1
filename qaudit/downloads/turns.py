"""Where on the way of subjects the members of a soup are added to its running sum.

A soup whose members do not lie on the disk together is summed up while they pass by: each is
there for its own sake at some time, and is added then, in the soup's order. A member that does
not come by itself, or not in that order, is brought for the sum alone, as late as can be. Two
sums can grow at once where the budget holds both; where it does not, the later one begins when
the other is over, and its members come once more.

A sum takes the disk from its first member to the time it is measured. An earlier scan may have
begun it: then it lies there from the start, and only the members that lack are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from qaudit.downloads.stays import Turn, fits


@dataclass(frozen=True)
class Sum:
    """What a soup is summed up from, and what that takes of the disk."""

    members: tuple[str, ...]  # contents in the order in which they are added
    growing_nbytes: int
    merged_nbytes: int  # once all are in
    begun: bool = False  # it lies on the disk already, with so many members:
    added: int = 0

    @property
    def lacking(self) -> tuple[str, ...]:
        """The members that are still to be added."""
        return self.members[self.added :]

    @property
    def nbytes(self) -> int:
        """What it takes as it lies there."""
        if not self.begun:
            return 0
        return self.growing_nbytes if self.lacking else self.merged_nbytes


def turns_of(
    order: Sequence[int],
    needs: Sequence[Sequence[str]],
    sums: Mapping[int, Sum],
    nbytes: Mapping[str, int],
    budget: int | None,
    *,
    passing: bool,
) -> tuple[Turn, ...]:
    """Return what is done in turn; without `passing` all members come right before their soup."""
    turns = [Turn(p, summed=True) if p in sums else Turn(p, tuple(needs[p])) for p in order]
    for position in (p for p in order if p in sums):
        together = _inserted(turns, position, sums[position], nbytes, passing=False)
        turns = together
        if passing:
            spread = _inserted(
                [turn for turn in together if turn.position != position or not turn.added],
                position,
                sums[position],
                nbytes,
                passing=True,
            )
            if fits(beside(spread, sums), nbytes, budget):
                turns = spread
    return beside(turns, sums)


def _inserted(
    turns: Sequence[Turn],
    position: int,
    summed: Sum,
    nbytes: Mapping[str, int],
    *,
    passing: bool,
) -> list[Turn]:
    """Put the turns of adding members in among others, each right before one that needs it too."""
    end = next(k for k, turn in enumerate(turns) if turn.position == position)
    meeting: list[int | None] = []
    start = 0
    for key in summed.lacking:
        found = next((k for k in range(start, end) if passing and key in turns[k].needs), None)
        meeting.append(found)
        start = start if found is None else found
    at = [
        next((later for later in meeting[number:] if later is not None), end)
        for number in range(len(meeting))
    ]
    coming: dict[int, list[Turn]] = {}
    for key, place in zip(summed.lacking, at, strict=True):
        needed = (key,) if key in nbytes else ()  # a folder of this machine is always there
        coming.setdefault(place, []).append(Turn(position, needed, key))
    return [turn for k, one in enumerate(turns) for turn in (*coming.get(k, ()), one)]


def beside(turns: Sequence[Turn], sums: Mapping[int, Sum]) -> tuple[Turn, ...]:
    """Say of every turn what running sums take of the disk meanwhile."""
    loads = [0] * len(turns)
    for position, summed in sums.items():
        for number, nbytes in _lying(turns, position, summed):
            loads[number] += nbytes
    return tuple(replace(turn, beside_nbytes=load) for turn, load in zip(turns, loads, strict=True))


def _lying(turns: Sequence[Turn], position: int, summed: Sum) -> Iterator[tuple[int, int]]:
    """Yield the turns in which a sum lies on the disk, and what it takes there."""
    own = [k for k, turn in enumerate(turns) if turn.position == position]
    if not own:  # whose soup is not measured any more
        return
    begin, last = 0 if summed.begun else own[0], max((k for k in own if turns[k].added), default=-1)
    for number in takewhile(lambda number: number <= own[-1], range(begin, len(turns))):
        yield number, summed.growing_nbytes if number <= last else summed.merged_nbytes
