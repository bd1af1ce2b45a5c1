"""A greedy soup, measured: candidates and trial means at one scheme, then the soup at all.

What is tried is looked up first and measured where it is not on disk, each mean under the one
scheme of the search and with the first draw of calibration text. It is kept by its content like
any measurement: a search that is resumed, or repeated with more schemes, goes the same way
without measuring, and may find its end without a weight being fetched.

Refused trials are in the evidence folder and are no subjects of the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from qaudit.core.merges.mean import Mean
from qaudit.engine.block_pass import Progress
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Machine, Task, look_up
from qaudit.errors import SourceError
from qaudit.planning.passes import scheme_of
from qaudit.saved.results import Filed, ResultStore
from qaudit.search.greedy import Search, greedy, searched_row, selection_loss
from qaudit.types import SELECTION, Checkpoint, Finding, GreedySearch, Subject

Measure = Callable[[Task], tuple[Filed, ...]]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The soup that a search ended with and its results; None where one checkpoint is best."""

    subject: Subject | None
    results: tuple[Filed, ...]
    row: GreedySearch
    findings: tuple[Finding, ...] = ()


def search(
    tasks: Sequence[Task], machine: Machine, store: ResultStore, progress: Progress
) -> SearchResult:
    """Search, measuring what is not on disk; the soup is then measured by every task."""
    return _search(tasks, lambda trial: measure(trial, machine, store, _named(trial, progress)))


def search_stored(
    tasks: Sequence[Task], machine: Machine, store: ResultStore
) -> SearchResult | None:
    """Return the result of a search whose measurements are all on disk."""
    try:
        return _search(tasks, lambda trial: _stored(trial, machine, store))
    except _NotMeasuredError:
        return None


class _NotMeasuredError(Exception):
    """A measurement that a search needs is not on disk."""


def _stored(trial: Task, machine: Machine, store: ResultStore) -> tuple[Filed, ...]:
    found = look_up(trial, machine, store)
    if not found.is_complete:
        raise _NotMeasuredError
    return found.results


def _named(trial: Task, progress: Progress) -> Progress:
    members = "+".join(checkpoint.label for checkpoint, _ in trial.subject.members)
    return lambda done, total, what: progress(done, total, f"{members}: {what}")


def _search(tasks: Sequence[Task], measured: Measure) -> SearchResult:
    task = tasks[0]
    search = task.subject
    scheme = scheme_of(search, task.schemes)
    documents = 0

    def loss(members: tuple[Checkpoint, ...]) -> float:
        nonlocal documents
        label = f"mean({'+'.join(c.label for c in members)})"
        trial = Task(_mean(label, members), task.corpus, (scheme,), task.folder, full=False)
        *_, quantized = measured(trial)
        evidence = quantized.measurement.evidence
        documents = int(evidence.scored(SELECTION).sum())
        return selection_loss(evidence)

    found = greedy([checkpoint for checkpoint, _ in search.members], loss)
    row = searched_row(search, scheme, found, documents)
    if row.loss is None:
        raise SourceError(
            f"no candidate of `{search.label}` has a finite loss at {scheme.short}",
            hint="measure them in float32, and look for outliers in their weights",
        )
    if len(found.members) < 2:
        return SearchResult(None, (), row, (_stays_alone(search, scheme.short, found),))
    soup = _mean(search.label, found.members)
    results = [result for one in tasks for result in measured(replace(one, subject=soup))]
    return SearchResult(soup, tuple(results), row)


def _mean(label: str, members: tuple[Checkpoint, ...]) -> Subject:
    """Return the mean of members under a label; of one, the checkpoint by its own name."""
    if len(members) == 1:
        return Subject(members[0].label, ((members[0], 1.0),))
    return Subject(label, tuple((c, 1 / len(members)) for c in members), Mean().spec)


def _stays_alone(search: Subject, scheme: str, found: Search[Checkpoint]) -> Finding:
    best = found.members[0].label
    return Finding(
        rule="QA017",
        level="info",
        subject=best,
        scheme=scheme,
        message=f"no member improves on `{best}` at {scheme}, so that `{search.label}` is no soup",
        hint="",
        outcome="pass",
    )
