"""The rounds of a race, and how many subjects may go on, to keep to a share of the tokens.

Documents double from round to round, so that there are few rounds: each one quantizes its
survivors anew. As many survive a look as the share allows, inversely to the documents they have
seen, so that every round costs about the same (as in sequential halving, Karnin et al. 2013);
the two finalists' documents to confirm on are part of the price.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qaudit.core import statistics

SHARE = 0.4
"""Of the tokens of an exhaustive run, what a race may take."""

_FIRST = 16  # the first round has this part of the documents to choose on, or the fewest there are
_FINALISTS = 2
_STEPS = 20  # of the search, until the number of survivors doubles


@dataclass(frozen=True)
class Look:
    """The documents after which subjects may leave, and how many go on where nothing is shown."""

    documents: int
    most: int


def schedule(
    subjects: int, documents: int, held_out: int, share: float = SHARE
) -> tuple[Look, ...]:
    """Return the rounds: twice the documents each time, and as many survivors as a share allows.

    Whatever the share, two may go on from half of the documents, four from a quarter.
    """
    ends = []
    end = max(statistics.MINIMUM_DOCUMENTS, math.ceil(documents / _FIRST))
    while 3 * end <= 2 * documents:
        ends.append(end)
        end *= 2
    ends.append(documents)
    most_tokens = share * subjects * (documents + held_out) - _FINALISTS * held_out
    looks = _looks(subjects, ends, 1.0)
    for step in range(_STEPS * subjects):
        more = _looks(subjects, ends, 1 + (step + 1) / _STEPS)
        if share < 1 and _cost(subjects, more) > most_tokens:
            break
        looks = more
    return looks


def _looks(subjects: int, ends: Sequence[int], factor: float) -> tuple[Look, ...]:
    """Let `factor` subjects reach the end of all documents, and more the fewer there are."""
    return tuple(
        Look(end, min(subjects, max(_FINALISTS, int(factor * ends[-1] / end)))) for end in ends
    )


def _cost(subjects: int, looks: Sequence[Look]) -> int:
    """Count documents over all subjects, if all go on that may."""
    cost = before = 0
    for look in looks:
        cost += subjects * (look.documents - before)
        before, subjects = look.documents, min(subjects, look.most)
    return cost
