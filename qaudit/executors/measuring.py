"""Measure subjects in this process, one after another, each while its weights are on disk.

Results on disk are found before anything is downloaded, so that a scan which only has to be
judged again asks the Hub for no weights. Subjects with the same weights, configuration and
schemes are measured once; the others share the results, or the failure. A failure of one subject
does not end the audit. What was measured is on disk at once, so the same command resumes.

Greedy soups: which of some candidates to average, found by measuring (Wortsman et al.).

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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from qaudit.core.course import previous_of
from qaudit.core.merges.averages import Mean
from qaudit.diagnostics.case import Diagnoses
from qaudit.diagnostics.diagnostic import parse_diagnostics
from qaudit.downloads.downloads import RECORD_FILE, Downloads, missing_nbytes
from qaudit.engine.block_pass import Progress
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Machine, StoredResults, Task, look_up
from qaudit.errors import MachineError, SourceError, is_out_of_memory
from qaudit.hub import Hub
from qaudit.planning.price import scheme_of, with_shipped
from qaudit.saved.results import ResultFile, ResultStore, UnitOutcome
from qaudit.types import (
    Checkpoint,
    Evidence,
    Finding,
    GreedyCandidate,
    GreedySearch,
    GreedyTrial,
    Plan,
    Subject,
    Watch,
)
from qaudit.whole import remove_stale


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


@dataclass(eq=False)
class _Job:
    """The passes of one subject, what is on disk of them, and what came of them."""

    tasks: tuple[Task, ...]
    before: Checkpoint | None = None  # the checkpoint before, where a diagnostic reads it
    results: Sequence[StoredResults | None] = ()  # of each pass, as looked up
    stored: UnitOutcome | None = None  # all results, where only a diagnostic is missing
    is_diagnosed: bool = False
    filed: list[tuple[ResultFile, ...]] = field(default_factory=list)  # of each pass, measured now
    event: UnitOutcome | None = None

    @property
    def subject(self) -> Subject:
        return self.tasks[0].subject

    @property
    def label(self) -> str:
        return self.subject.label

    def diagnosed(self, event: UnitOutcome) -> Task | None:
        """Return the task of diagnostics: the subject, or the soup that a search ended with."""
        if not self.is_diagnosed:
            return None
        if event.search is None:
            return self.tasks[0]
        return None if event.soup is None else self.tasks[0].changed(subject=event.soup)

    def measured(self, filed: Sequence[tuple[ResultFile, ...]]) -> UnitOutcome:
        results = tuple(
            replace(result, perturbed=task.perturbed)
            for task, some in zip(self.tasks, filed, strict=True)
            for result in some
        )
        failed = {scheme: e for task in self.tasks for scheme, e in task.failed.items()}
        return UnitOutcome(self.label, results, failed=failed)


@dataclass(eq=False)
class Measuring:
    """Measures tasks, subject by subject."""

    plan: Plan
    folder: Path  # with the record of downloads
    hub: Hub | None
    machine: Machine
    watch: Watch
    store: ResultStore
    # All subjects of the plan, where only a part of them is visited: the checkpoint before one of
    # them may then be fetched for diagnostics alone.
    series: Sequence[Subject] = ()
    seconds_waited: float = 0.0  # for downloads

    def __post_init__(self) -> None:
        remove_stale(self.store.folder)  # of processes that were killed while they wrote
        self.diagnoses = Diagnoses((), (), self.machine, self.store)

    def visit(
        self, tasks: Sequence[Task], diagnosed: Collection[str] = ()
    ) -> Iterator[UnitOutcome]:
        """Measure every subject, in the order of their downloads."""
        jobs = self._jobs(tasks, diagnosed)
        pending: dict[tuple[str, ...], _Job] = {}  # by what decides results
        twins: list[tuple[_Job, _Job]] = []  # with the first of equal results
        for job in jobs:
            if (event := self._find(job, pending, twins)) is not None:
                yield event
        by_label = {job.label: job for job in pending.values()}
        first, total = len(jobs) - len(pending) - len(twins), len(jobs)
        waited = self.seconds_waited
        budget = self._budget
        with Downloads(
            self.hub,
            [*map(self._needs, pending.values())],
            others=[self._needs(job) for job, _ in twins],
            # the texts are downloaded beside the weights
            disk_budget_nbytes=budget and budget - missing_nbytes(self.plan.texts),
            record=self.folder / RECORD_FILE,
        ) as downloads:
            for number, subject in enumerate(downloads.order, first):
                job = by_label[subject.label]
                self.watch.subject(number, total, subject.label)
                with self._failing(job), downloads.ready(self._needs(job)):
                    job.tasks = tuple(replace(task, folder=downloads.folder) for task in job.tasks)
                    if job.subject.is_search:
                        machine = replace(self.machine, keeps_weights=())  # of its many trials
                        job.event = search(job.tasks, machine, self.store, self.watch.block)
                    # Passes are measured here: a function more would lengthen the way to a scheme.
                    for task, results in zip(job.tasks, job.results, strict=False):
                        watch = None
                        if job.is_diagnosed and task is job.tasks[0]:
                            watch = self.diagnoses.watch(task, self.watch.block)
                        place = self.machine, self.store, self.watch.block
                        job.filed.append(measure(task, *place, watch, results))
                    job.event = job.event or job.measured(job.filed)
                    if (whole := job.diagnosed(job.event)) is not None:
                        self.diagnoses.take(whole, self.watch.block)
                self.seconds_waited = waited + downloads.seconds_waited
                assert job.event is not None, "its weights were released with an event"
                yield job.event
        for job, first_job in twins:  # whose weights are those of another one
            assert first_job.event is not None, "the first of equal results has an outcome"
            if (error := first_job.event.error) is not None:
                reason = f"its weights are those of `{first_job.label}`: {error.message}"
                yield UnitOutcome(job.label, error=SourceError(reason, hint=error.hint))
                continue
            filed = [look_up(task, self.machine, self.store).results for task in job.tasks]
            if job.is_diagnosed:
                self.diagnoses.find(job.tasks[0], first_job.label)
            yield replace(job.measured(filed), failed=first_job.event.failed)
        self.watch.subject(total, total, "")

    def _jobs(self, tasks: Sequence[Task], diagnosed: Collection[str]) -> list[_Job]:
        groups = [tuple(some) for _, some in groupby(tasks, lambda task: task.subject)]
        subjects = [some[0].subject for some in groups if some[0].subject.label in diagnosed]
        recipe, series = self.plan.recipe, self.series or subjects
        requested = parse_diagnostics(recipe.diagnostics) if subjects else ()
        diagnostics = [diagnostic for diagnostic in requested if diagnostic.reads_weights]
        self.diagnoses = Diagnoses(
            diagnostics,
            series,
            self.machine,
            self.store,
            recipe.confidence,
            evicts=self._budget is not None and not self.series,
        )
        jobs = [_Job(some, is_diagnosed=some[0].subject in subjects) for some in groups]
        if any(diagnostic.reads_previous for diagnostic in diagnostics):
            for job in jobs:
                job.before = previous_of(job.subject, series) if job.is_diagnosed else None
        return jobs

    @property
    def _budget(self) -> int | None:
        return None if self.plan.traffic is None else self.plan.traffic.nbytes_disk_budget

    def _needs(self, job: _Job) -> Subject:
        beside = [file for task in job.tasks for file in task.pass_.beside]
        if job.before is not None and self.series:
            beside.append(job.before)
        return with_shipped(job.subject, beside)

    def _find(
        self, job: _Job, pending: dict[tuple[str, ...], _Job], twins: list[tuple[_Job, _Job]]
    ) -> UnitOutcome | None:
        """Return a result that needs no weights; add the job to `pending` or `twins` otherwise."""
        place = self.machine, self.store
        keys: tuple[str, ...] = (job.label,)
        event: UnitOutcome | None = None
        try:
            if job.subject.is_search:
                event = search(job.tasks, *place)
            else:
                job.results = results = [look_up(task, *place) for task in job.tasks]
                keys = tuple(key for result in results for key in result.keys.values())
                if all(result.is_complete for result in results):
                    event = job.measured([result.results for result in results])
        except SourceError as error:
            return UnitOutcome(job.label, error=error)
        if event is not None:
            task = job.diagnosed(event)
            if task is None:
                return event
            if not self.diagnoses.lacks(task):
                self.diagnoses.find(task)
                return event
        if job.before is not None:
            keys = (*keys, job.before.content)
        if keys in pending:
            twins.append((job, pending[keys]))
            return None
        own = {*keys}
        if any(not own.isdisjoint(other) for other in pending):
            job.results = [None] * len(job.tasks)  # a job before it measures some of them
        pending[keys], job.stored = job, event
        return None

    @contextmanager
    def _failing(self, job: _Job) -> Iterator[None]:
        """Let a failure of a subject, or of its weights, become its event."""
        try:
            yield
        except SourceError as error:
            job.event = job.stored or UnitOutcome(job.label, error=error)
            if job.stored is not None:
                self.diagnoses.fail(job.label, error.message)  # its losses were measured before
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise MachineError(
                f"out of memory while measuring `{job.label}`; what was measured is kept",
                hint="set less: `--set context=N`, `--set calibration_documents=N` or "
                "`--set stream_memory=SIZE`",
            ) from error
