"""A race: subjects that are clearly worse stop costing passes, and noise decides no ties.

All remaining subjects are measured on the same documents, and rounds add documents until one
subject remains or the documents to choose on are used up (synchronized successive rejects,
2606.07726; successive rejects: Audibert and Bubeck 2010). A subject leaves for one of two reasons:

- it is shown to be behind: by the interval of its loss minus the leader's, the documents still to
  come will not put it ahead by more than the margin. All rounds and rivals are judged at once
  (Bonferroni), and after n of N documents an interval is shorter by sqrt(1 - n/N), because the
  result on all N is estimated and n of them are known (Cochran 1977, 2.6);
- by the schedule, as in those papers: fewer subjects go on as documents grow, so that the whole
  race takes no more than a share of the tokens of an exhaustive run. No subject within the margin
  of the leader leaves so, and one that does is reported as not shown to be worse.

The first alone is almost never wrong and pays for every tie in full; the second alone spends as
much where ten documents decide. `benchmarks/race.py` compares them. With a share of one no subject
leaves by the schedule. The limit: below eight subjects two finalists on all documents are a large
part of everything, and the share is exceeded.

Documents double from round to round, so that there are few rounds: each one quantizes its
survivors anew. As many survive a look as the share allows, inversely to the documents they have
seen, so that every round costs about the same (as in sequential halving, Karnin et al. 2013);
the two finalists' documents to confirm on are part of the price.

Documents are taken in the order of their hashes, so that the first of them are a random sample.
The best on those to choose on is then compared with the nearest others on documents that none was
chosen on, as in `pick.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.statistics import Array
from qaudit.types import HELD_OUT, SELECTION, Departure, Interval, Race, Round

Positions = npt.NDArray[np.int64]
Provider = Callable[[Sequence[str], Positions], Mapping[str, Array]]
"""Measures subjects on documents: the summed loss of each that can be measured."""

MARGIN = 0.002
"""A fraction of the loss that does not matter: another draw of calibration text moves as much."""

SHARE = 0.4
"""Of the tokens of an exhaustive run, what a race may take."""

_FIRST = 16  # the first round has this part of the documents to choose on, or the fewest there are
_FINALISTS = 2
_STEPS = 20  # of the search, until the number of survivors doubles


@dataclass(frozen=True, eq=False)
class RaceCourse:
    """The subjects of a race, and its documents by their position in the whole text."""

    subjects: tuple[str, ...]
    tokens: npt.NDArray[np.int64]
    selection: Positions  # in the order in which they are taken
    held_out: Positions

    @classmethod
    def of(
        cls,
        subjects: Sequence[str],
        tokens: npt.NDArray[np.int64],
        split: Sequence[str],
        sha256: Sequence[str],
    ) -> RaceCourse:
        """Take documents with a scored token in the order of their hashes: a random one."""
        order = np.array(sorted(range(len(sha256)), key=sha256.__getitem__), dtype=np.int64)
        order = order[tokens[order] > 0]
        half = np.array(split)[order]
        return cls(tuple(subjects), tokens, order[half == SELECTION], order[half == HELD_OUT])

    @property
    def exhaustive_tokens(self) -> int:
        everything = np.concatenate([self.selection, self.held_out])
        return len(self.subjects) * int(self.tokens[everything].sum())


RoundWatch = Callable[[Round], None]


def race(
    course: RaceCourse,
    provider: Provider,
    *,
    margin: float = MARGIN,
    share: float = SHARE,
    confidence: float = 0.95,
    watch: RoundWatch = lambda finished: None,
) -> Race:
    looks = schedule(len(course.subjects), len(course.selection), len(course.held_out), share)
    comparisons = (len(course.subjects) - 1) * (len(looks) - 1)
    rules = _Rules(margin, share, statistics.simultaneous(confidence, comparisons), confidence)
    running = _Running(course, provider, rules)
    rounds: list[Round] = []
    for look in looks:
        if rounds and len(running.subjects) < 2:
            break
        rounds.append(running.take(look))
        watch(rounds[-1])
    return running.finish(tuple(rounds))


@dataclass(frozen=True)
class _Rules:
    margin: float
    share: float
    at_once: float  # confidence of each interval on the way
    confidence: float


class _Running:
    """The remaining subjects, and their losses so far in the order of the documents."""

    def __init__(self, course: RaceCourse, provider: Provider, rules: _Rules) -> None:
        self._course, self._provider, self._rules = course, provider, rules
        self.subjects = list(course.subjects)
        self._known = {subject: np.zeros(0) for subject in self.subjects}
        self._seen = self._spent = 0

    def take(self, look: RaceLook) -> Round:
        """Measure the remaining subjects on the next documents, and drop those behind."""
        entrants, spent = tuple(self.subjects), self._spent
        broken = self._measure(self._course.selection[self._seen : look.documents])
        self._seen = look.documents
        ranked = self._ranked()
        departures = [Departure(subject, None, shown=False) for subject in broken]
        if self._seen < len(self._course.selection) and ranked:
            departures += self._beaten(ranked, look.most)
        gone = {departure.subject for departure in departures}
        self.subjects = [subject for subject in self.subjects if subject not in gone]
        leader = ranked[0] if ranked else None
        return Round(self._seen, entrants, leader, tuple(departures), self._spent - spent)

    def _measure(self, positions: Positions) -> list[str]:
        losses = self._provider(tuple(self.subjects), positions)
        self._spent += len(self.subjects) * int(self._course.tokens[positions].sum())
        broken = [s for s in self.subjects if s not in losses or not np.isfinite(losses[s]).all()]
        self.subjects = [subject for subject in self.subjects if subject not in broken]
        for subject in self.subjects:
            self._known[subject] = np.concatenate([self._known[subject], losses[subject]])
        return broken

    def _ranked(self) -> list[str]:
        return sorted(self.subjects, key=lambda subject: float(self._known[subject].sum()))

    def _beaten(self, ranked: Sequence[str], most: int) -> list[Departure]:
        """Return the subjects shown to be behind, and those that the schedule drops."""
        course, leader, departures = self._course, self._known[ranked[0]], []
        tokens = course.tokens[course.selection[: self._seen]]
        share = self._seen / len(course.selection)
        slack = self._rules.margin * float(leader.sum()) / float(tokens.sum())
        for place, subject in enumerate(ranked[1:], 1):
            behind = ahead_of(self._known[subject], leader, tokens, share, self._rules.at_once)
            shown = behind.low > -slack
            if shown or (place >= most and behind.estimate > slack):
                departures.append(Departure(subject, behind, shown))
        return departures

    def finish(self, rounds: tuple[Round, ...]) -> Race:
        """Compare the winner with the nearest others on documents that none was chosen on."""
        ranked, held_out = self._ranked(), self._course.held_out
        if not ranked:
            return self._race(rounds, None)
        winner, rivals = ranked[0], self._nearest(ranked, rounds)
        if not rivals or len(held_out) == 0:
            return self._race(rounds, winner, runner_up=rivals[0] if rivals else None)
        self.subjects = [winner, *rivals]
        self._known = {subject: np.zeros(0) for subject in self.subjects}
        self._measure(held_out)
        rivals = [subject for subject in rivals if subject in self.subjects]
        if winner not in self.subjects or not rivals:
            return self._race(rounds, winner)
        return self._race(rounds, winner, **self._confirmed(winner, rivals))

    def _nearest(self, ranked: Sequence[str], rounds: Sequence[Round]) -> list[str]:
        """Return the rivals of the winner: survivors, or else the one least behind."""
        if len(ranked) > 1:
            return [ranked[1], *self._third(ranked)]
        behind = {
            departure.subject: departure.behind.estimate
            for look in rounds
            for departure in look.left
            if departure.behind is not None
        }
        return sorted(behind, key=behind.__getitem__)[:1]

    def _third(self, ranked: Sequence[str]) -> list[str]:
        """Return the third, if it is within the margin and the share allows to confirm it."""
        course, rules = self._course, self._rules
        most = float(self._known[ranked[0]].sum()) * (1 + rules.margin)
        spent = self._spent + 3 * int(course.tokens[course.held_out].sum())
        if rules.share < 1 and spent > rules.share * course.exhaustive_tokens:
            return []
        return [s for s in ranked[2:3] if float(self._known[s].sum()) <= most]

    def _confirmed(self, winner: str, others: Sequence[str]) -> dict[str, Any]:
        tokens = self._course.tokens[self._course.held_out]
        enough = len(tokens) >= statistics.MINIMUM_DOCUMENTS
        best, confidence = self._known[winner], self._rules.confidence
        lead = statistics.outright(best, self._known[others[0]], tokens, confidence)
        level = statistics.simultaneous(confidence, len(others))
        return {
            "runner_up": others[0],
            "interval": lead,
            "confirmed_on": len(tokens) if enough and lead.high < 0 else None,
            "contenders": tuple(
                other
                for other in others
                if not enough
                or statistics.outright(best, self._known[other], tokens, level).high >= 0
            ),
        }

    def _race(self, rounds: tuple[Round, ...], winner: str | None, **confirmed: Any) -> Race:
        return Race(
            rounds,
            winner,
            tokens=self._spent,
            exhaustive_tokens=self._course.exhaustive_tokens,
            **confirmed,
        )


def ahead_of(
    a: Array, b: Array, tokens: npt.NDArray[np.int64], share: float, confidence: float
) -> Interval:
    """Return an interval of a's loss minus b's on all documents, from the share that is known."""
    sums = (a, b, tokens.astype(np.float64))
    estimate, influence = statistics.influences(sums, lambda s: (s[0] - s[1]) / s[2])
    if influence is None:
        return Interval(estimate, -math.inf, math.inf)
    below, above = statistics.reach(statistics.spread_of(influence), confidence)
    unseen = math.sqrt(max(0.0, 1 - share))  # n of N documents are known already
    return Interval(estimate, estimate - unseen * below, estimate + unseen * above)


@dataclass(frozen=True)
class RaceLook:
    """The documents after which subjects may leave, and how many go on where nothing is shown."""

    documents: int
    most: int


def schedule(
    subjects: int, documents: int, held_out: int, share: float = SHARE
) -> tuple[RaceLook, ...]:
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


def _looks(subjects: int, ends: Sequence[int], factor: float) -> tuple[RaceLook, ...]:
    """Let `factor` subjects reach the end of all documents, and more the fewer there are."""
    return tuple(
        RaceLook(end, min(subjects, max(_FINALISTS, int(factor * ends[-1] / end)))) for end in ends
    )


def _cost(subjects: int, looks: Sequence[RaceLook]) -> int:
    """Count documents over all subjects, if all go on that may."""
    cost = before = 0
    for look in looks:
        cost += subjects * (look.documents - before)
        before, subjects = look.documents, min(subjects, look.most)
    return cost
