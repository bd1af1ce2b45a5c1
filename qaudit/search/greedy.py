"""Greedy soups: which of some candidates to average, found by measuring (Wortsman et al.).

The recipe of 2203.05482, at the scheme that will be shipped: candidates are ranked by their own
quantized loss, and from the best on each next one goes in if the quantized loss of the mean
falls. A search over many soups flatters the one it ends with, so that it chooses on further
documents of the evaluation text, which no verdict reads. Where the text has too few it chooses on
those that judge, and all means that were tried count there (`judge.choose`).

Each mean is looked up first and measured where it is not on disk, under the one scheme of the
search and with the first draw of calibration text. It is filed by its content like any
measurement: a search that is resumed, or repeated with more schemes, goes the same way without
measuring, and may find its end without a weight being fetched. Members are averaged in the order
in which they were named, so that the same soup named by its members is the same measurement.
Refused trials are in the evidence folder and are no subjects of the audit.

Given up: a candidate that was refused is not tried again later, as in the original.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from qaudit.core.merges.averages import Mean
from qaudit.core.scheme import Scheme
from qaudit.engine.block_pass import Progress
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Machine, Task, look_up
from qaudit.errors import SourceError
from qaudit.planning.price import scheme_of
from qaudit.saved.results import ResultFile, ResultStore, UnitOutcome
from qaudit.types import (
    Checkpoint,
    Evidence,
    Finding,
    GreedyCandidate,
    GreedySearch,
    GreedyTrial,
    Subject,
)

T = TypeVar("T")
Measure = Callable[[Task], tuple[ResultFile, ...]]


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
        losses = [trial.loss for trial in self.trials if trial.taken]
        return losses[-1] if losses else self.ranking[0][1]


def greedy(candidates: Sequence[T], loss: Callable[[tuple[T, ...]], float]) -> Search[T]:
    """Search among candidates; `loss` measures each by itself, then means of several."""
    losses = [loss((candidate,)) for candidate in candidates]
    places = sorted(
        range(len(candidates)), key=lambda k: (not math.isfinite(losses[k]), losses[k], k)
    )
    taken, best, trials = places[:1], losses[places[0]], []
    for place in places[1:]:
        if not math.isfinite(losses[place]):
            break  # broken by itself: these come last, and no mean with one of them is finite
        members = sorted([*taken, place])
        of_mean = loss(tuple(candidates[k] for k in members))
        better = of_mean < best
        if better:
            taken, best = members, of_mean
        trials.append(Trial(candidates[place], of_mean, better))
    return Search(
        ranking=tuple((candidates[k], losses[k]) for k in places),
        trials=tuple(trials),
        members=tuple(candidates[k] for k in taken),
    )


def loss_per_token(evidence: Evidence) -> float:
    tokens = int(evidence.tokens.sum())
    return float(evidence.nll_sum[evidence.scored()].sum()) / tokens if tokens else math.nan


def searched_row(
    subject: Subject,
    scheme: Scheme,
    search: Search[Checkpoint],
    documents: int,
    *,
    further: bool,
) -> GreedySearch:
    return GreedySearch(
        label=subject.label,
        scheme=scheme.short,
        spec=scheme.spec,
        documents=documents,
        candidates=tuple(GreedyCandidate(c.label, _number(x)) for c, x in search.ranking),
        trials=tuple(GreedyTrial(t.added.label, _number(t.loss), t.taken) for t in search.trials),
        members=tuple(c.label for c in search.members),
        loss=_number(search.loss),
        further=further,
    )


def _number(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def search(
    tasks: Sequence[Task], machine: Machine, store: ResultStore, progress: Progress
) -> UnitOutcome:
    """Search, measuring what is not on disk; the soup is then measured by every task."""
    return _search(
        tasks,
        machine,
        store,
        lambda trial: measure(trial, machine, store, _named(trial, progress)),
    )


def search_stored(
    tasks: Sequence[Task], machine: Machine, store: ResultStore
) -> UnitOutcome | None:
    """Return the result of a search whose measurements are all on disk."""

    def stored(trial: Task) -> tuple[ResultFile, ...]:
        looked = look_up(trial, machine, store)
        if not looked.is_complete:
            raise _NotMeasuredError
        return looked.results

    try:
        return _search(tasks, machine, store, stored)
    except _NotMeasuredError:
        return None


class _NotMeasuredError(Exception):
    """A measurement that a search needs is not on disk."""


def _named(trial: Task, progress: Progress) -> Progress:
    members = "+".join(checkpoint.label for checkpoint, _ in trial.subject.members)
    return lambda done, total, what: progress(done, total, f"{members}: {what}")


def _search(
    tasks: Sequence[Task], machine: Machine, store: ResultStore, measured: Measure
) -> UnitOutcome:
    """Search; a trial that is not on disk is `measured`, and so is the soup."""
    task = tasks[0]
    search = task.subject
    scheme = scheme_of(search, task.schemes)
    text, documents = task.corpus.of_search(), 0
    # Where it chooses on what is judged, candidates are measured by passes of their own.
    judged = text if task.corpus.search else task.corpus

    def loss(members: tuple[Checkpoint, ...]) -> float:
        nonlocal documents
        label = f"mean({'+'.join(c.label for c in members)})"
        trial = Task.unplanned(_mean(label, members), judged, (scheme,), full_precision=False)
        trial = replace(trial, folder=task.folder)
        # The result of a subject's own pass may have scored rollouts, too.
        stored = look_up(replace(trial, corpus=judged.of_tasks(())), machine, store)
        *_, quantized = stored.results or measured(replace(trial, corpus=text))
        evidence = quantized.measurement.evidence
        documents = int(evidence.scored().sum())
        return loss_per_token(evidence)

    outcome = greedy([checkpoint for checkpoint, _ in search.members], loss)
    row = searched_row(search, scheme, outcome, documents, further=bool(task.corpus.search))
    if row.loss is None:
        raise SourceError(
            f"no candidate of `{search.label}` has a finite loss at {scheme.short}",
            hint="measure them in float32, and look for outliers in their weights",
        )
    if len(outcome.members) < 2:
        best = outcome.members[0].label
        message = f"no member improves on `{best}` at {scheme.short}, so that `{search.label}`"
        alone = Finding(
            "QA017", "info", best, scheme.short, f"{message} is no soup", "", outcome="pass"
        )
        return UnitOutcome(search.label, search=row, findings=(alone,))
    soup = _mean(search.label, outcome.members)
    results = [result for task in tasks for result in measured(task.changed(subject=soup))]
    return UnitOutcome(search.label, tuple(results), row, soup)


def _mean(label: str, members: tuple[Checkpoint, ...]) -> Subject:
    """Return the mean of members under a label; of one, the checkpoint by its own name."""
    if len(members) == 1:
        return Subject(members[0].label, ((members[0], 1.0),))
    return Subject(label, tuple((c, 1 / len(members)) for c in members), Mean().spec)
