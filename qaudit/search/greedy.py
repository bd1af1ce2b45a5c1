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
from dataclasses import replace

from qaudit.core.merges.averages import Mean
from qaudit.engine.block_pass import Progress
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Machine, Task, look_up
from qaudit.errors import SourceError
from qaudit.planning.price import scheme_of
from qaudit.saved.results import ResultFile, ResultStore, UnitOutcome
from qaudit.types import Evidence, Finding, GreedyCandidate, GreedySearch, GreedyTrial, Subject


def greedy(names: Sequence[str], loss: Callable[[tuple[str, ...]], float]) -> GreedySearch:
    """Search among candidates; `loss` measures each by itself, then means of several."""
    losses = {name: loss((name,)) for name in names}
    ranking = sorted(names, key=lambda name: (not math.isfinite(losses[name]), losses[name]))
    first, *further = ranking
    members: tuple[str, ...] = (first,)
    best, trials = losses[first], []
    for name in further:
        if not math.isfinite(losses[name]):
            break  # broken by itself: these come last, and no mean with one of them is finite
        tried = tuple(each for each in names if each in (*members, name))
        of_mean = loss(tried)
        better = of_mean < best
        if better:
            members, best = tried, of_mean
        trials.append(GreedyTrial(name, _number(of_mean), better))
    return GreedySearch(
        label="",
        scheme="",
        documents=0,
        candidates=tuple(GreedyCandidate(name, _number(losses[name])) for name in ranking),
        trials=tuple(trials),
        members=members,
        loss=_number(best),
    )


def _number(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def loss_per_token(evidence: Evidence) -> float:
    tokens = int(evidence.tokens.sum())
    return float(evidence.nll_sum[evidence.scored()].sum()) / tokens if tokens else math.nan


class _NotMeasuredError(Exception):
    """A measurement that a search needs is not on disk."""


def search(
    tasks: Sequence[Task], machine: Machine, store: ResultStore, progress: Progress | None = None
) -> UnitOutcome | None:
    """Search, measuring what is not on disk; the soup is then measured by every task.

    Without `progress` nothing is measured: None where something is not on disk.
    """
    task = tasks[0]
    subject = task.subject
    scheme = scheme_of(subject, task.schemes)
    text, documents = task.corpus.of_search(), 0
    # Where it chooses on what is judged, candidates are measured by passes of their own.
    judged = text if task.corpus.search else task.corpus
    candidates = {checkpoint.label: checkpoint for checkpoint, _ in subject.members}

    def measured(trial: Task) -> tuple[ResultFile, ...]:
        if progress is not None:
            names = "+".join(checkpoint.label for checkpoint, _ in trial.subject.members)
            return measure(
                trial,
                machine,
                store,
                lambda done, total, what: progress(done, total, f"{names}: {what}"),
            )
        looked = look_up(trial, machine, store)
        if not looked.is_complete:
            raise _NotMeasuredError
        return looked.results

    def mean(label: str, names: Sequence[str]) -> Subject:
        """Return the mean of members under a label; of one, the checkpoint by its own name."""
        if len(names) == 1:
            return Subject(names[0], ((candidates[names[0]], 1.0),))
        return Subject(label, tuple((candidates[n], 1 / len(names)) for n in names), Mean().spec)

    def loss(names: tuple[str, ...]) -> float:
        nonlocal documents
        of_names = mean(f"mean({'+'.join(names)})", names)
        trial = Task.unplanned(of_names, judged, (scheme,), full_precision=False)
        trial = replace(trial, folder=task.folder)
        # The result of a subject's own pass may have scored rollouts, too.
        stored = look_up(replace(trial, corpus=judged.of_tasks(())), machine, store)
        *_, quantized = stored.results or measured(replace(trial, corpus=text))
        evidence = quantized.measurement.evidence
        documents = int(evidence.scored().sum())
        return loss_per_token(evidence)

    try:
        row = greedy([*candidates], loss)
        if row.loss is None:
            raise SourceError(
                f"no candidate of `{subject.label}` has a finite loss at {scheme.short}",
                hint="measure them in float32, and look for outliers in their weights",
            )
        row = replace(row, label=subject.label, scheme=scheme.short, spec=scheme.spec)
        row = replace(row, documents=documents, further=bool(task.corpus.search))
        if len(row.members) < 2:
            best = row.members[0]
            message = f"no member improves on `{best}` at {scheme.short}, so that `{row.label}`"
            alone = Finding(
                "QA017", "info", best, scheme.short, f"{message} is no soup", "", outcome="pass"
            )
            return UnitOutcome(row.label, search=row, findings=(alone,))
        soup = mean(row.label, row.members)
        results = [result for each in tasks for result in measured(each.changed(subject=soup))]
    except _NotMeasuredError:
        return None
    return UnitOutcome(row.label, tuple(results), row, soup)
