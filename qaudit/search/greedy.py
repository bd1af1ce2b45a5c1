"""Greedy soups: which of some candidates to average, found by measuring (Wortsman et al.).

The recipe of 2203.05482, at the scheme that will be shipped: candidates are ranked by their own
quantized loss, and from the best on each next one goes in if the quantized loss of the mean
falls. Losses are those of the documents to choose on; the other half tells afterwards what the
soup is worth, since a search over many soups flatters the one it ends with.

The search is a pure function of `loss`, which may measure, look up, or be made up in a test.
Members are averaged in the order in which they were named and not in that of the search, so that
the same soup asked for by its members is the same measurement.

Given up: a candidate that was refused is not tried again later, as in the original.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from qaudit.core.scheme import Scheme
from qaudit.types import (
    SELECTION,
    Checkpoint,
    Evidence,
    GreedyCandidate,
    GreedySearch,
    GreedyTrial,
    Subject,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Trial(Generic[T]):
    """One mean that was tried: the members so far and another one."""

    added: T
    loss: float
    taken: bool


@dataclass(frozen=True)
class Search(Generic[T]):
    """What was tried, in order; `ranking` is the candidates with their own losses."""

    ranking: tuple[tuple[T, float], ...]
    trials: tuple[Trial[T], ...]
    members: tuple[T, ...]  # in the order in which the candidates were named

    @property
    def loss(self) -> float:
        """The loss of what the search ended with."""
        taken = [trial.loss for trial in self.trials if trial.taken]
        return taken[-1] if taken else self.ranking[0][1]


def greedy(candidates: Sequence[T], loss: Callable[[tuple[T, ...]], float]) -> Search[T]:
    """Search among candidates; `loss` is asked for one at a time, then for means of several."""
    own = [loss((candidate,)) for candidate in candidates]
    places = sorted(range(len(candidates)), key=lambda k: (not math.isfinite(own[k]), own[k], k))
    taken, best, trials = places[:1], own[places[0]], []
    for place in places[1:]:
        if not math.isfinite(own[place]):
            break  # broken by itself: these stand last, and nothing comes of averaging them in
        members = sorted([*taken, place])
        found = loss(tuple(candidates[k] for k in members))
        better = found < best
        if better:
            taken, best = members, found
        trials.append(Trial(candidates[place], found, better))
    return Search(
        ranking=tuple((candidates[k], own[k]) for k in places),
        trials=tuple(trials),
        members=tuple(candidates[k] for k in taken),
    )


# ---------------------------------------------------------------------------- on which documents


def selection_loss(evidence: Evidence) -> float:
    """Return the loss per token on the documents to choose on."""
    marked = evidence.scored(SELECTION)
    tokens = int(evidence.tokens[marked].sum())
    return float(evidence.nll_sum[marked].sum()) / tokens if tokens else math.nan


# ------------------------------------------------------------------------------ what is kept of it


def searched_row(
    subject: Subject, scheme: Scheme, search: Search[Checkpoint], documents: int
) -> GreedySearch:
    """Return a search as a row of `diagnostics`: a loss that is not finite is None."""
    return GreedySearch(
        label=subject.label,
        scheme=scheme.short,
        spec=scheme.spec,
        documents=documents,
        candidates=tuple(GreedyCandidate(c.label, _number(x)) for c, x in search.ranking),
        trials=tuple(GreedyTrial(t.added.label, _number(t.loss), t.taken) for t in search.trials),
        members=tuple(c.label for c in search.members),
        loss=_number(search.loss),
    )


def _number(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
