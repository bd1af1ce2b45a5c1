"""Measure subjects in this process, one after another, each while its weights are on disk.

Results on disk are found before anything is downloaded, so that a scan which only has to be
judged again asks the Hub for no weights. Subjects with the same weights, configuration and
schemes are measured once; the others share the results, or the failure. A failure of one subject
does not end the audit. What was measured is on disk at once, so the same command resumes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from qaudit.core.course import previous_of
from qaudit.diagnostics.case import Diagnoses
from qaudit.diagnostics.registry import parse_diagnostics
from qaudit.downloads.downloads import RECORD_FILE, Downloads, missing_nbytes
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Machine, StoredResults, Task, look_up
from qaudit.errors import MachineError, SourceError, is_out_of_memory
from qaudit.executors.folder import cost_of
from qaudit.hub import Hub
from qaudit.planning.price import with_shipped
from qaudit.saved.results import ResultFile, ResultStore, UnitOutcome
from qaudit.search.greedy import search
from qaudit.types import Checkpoint, Plan, Subject, Watch, WorkUnit
from qaudit.whole import remove_stale


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
        units = [WorkUnit(tuple(t.pass_ for t in job.tasks)) for job in by_label.values()]
        self.watch.expect({unit.label: cost_of(unit) for unit in units})
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
                self.watch.subject(number, total, subject.label, len(job.tasks))
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
