"""Run passes in this process, one subject after another, each while its weights are on disk.

Results on disk are found before anything is downloaded, so that a scan which only has to be
judged again asks the Hub for no weights. Subjects with the same weights, configuration and
schemes are measured once; the others share the results, or the failure. A failure of one subject
does not end the audit. What was measured is on disk at once, so the same command resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from qaudit.checkpoints.places import own_cache
from qaudit.diagnostics.driver import Diagnoses
from qaudit.diagnostics.registry import parse_diagnostics
from qaudit.downloads.downloads import Downloads
from qaudit.downloads.pieces import SummedWeights
from qaudit.downloads.running_sum import SUMS_FOLDER, Sums
from qaudit.downloads.sources import RECORD_FILE
from qaudit.engine.machine import environment, peak_nbytes, resident_nbytes
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Machine, Task, look_up
from qaudit.errors import MachineError, SourceError, is_out_of_memory
from qaudit.executors.events import RETRY_TASK, Compared, Ended, Event, Failed, Measured, Started
from qaudit.executors.ready import Ready, make_ready, protocol_of
from qaudit.hub import Hub
from qaudit.planning.prepare import Prepared
from qaudit.planning.shipped import with_shipped
from qaudit.planning.traffic import missing_nbytes
from qaudit.saved.results import Filed, ResultStore
from qaudit.search.greedy import search, search_stored
from qaudit.search.released import compare_stored, compare_weights, store_difference
from qaudit.search.result import SearchResult
from qaudit.types import SILENT, Checkpoint, Pass, Plan, Subject, Watch
from qaudit.version import __version__


class InProcess:
    """The executor of one machine."""

    def __init__(self, prepared: Prepared, watch: Watch = SILENT) -> None:
        """Run what was prepared; `watch` is told how far it is."""
        self._prepared, self._watch = prepared, watch
        self._ready: Ready | None = None  # one text and one machine for every plan

    def execute(self, plan: Plan, passes: Sequence[Pass]) -> Iterator[Event]:
        """Run passes of the plan that was prepared."""
        began = datetime.now(UTC)
        hub = self._prepared.hub
        ready = self._ready = self._ready or make_ready(plan, self._prepared.options, hub)
        baseline = resident_nbytes()
        yield Started(protocol_of(ready.corpus))
        for label, error in ready.refused.items():
            yield Failed(label, error)
        for task, reason in ready.corpus.failed_tasks:
            yield Failed(f"task {task}", SourceError(reason, hint=RETRY_TASK))
        releases = [one.subject for one in passes if one.subject.is_release]
        tasks = [
            Task.of(one, ready.corpus)
            for one in passes
            if not one.subject.is_release and one.subject.label not in ready.refused
        ]
        measuring = Measuring(replace(self._prepared, plan=plan), ready.machine, self._watch)
        measured = set()
        for event in measuring.visit(tasks, releases):
            measured |= {event.label} if isinstance(event, Measured) else set()
            yield event
        yield Ended(
            {
                **environment(ready.machine.device),
                "qaudit": __version__,
                "began": began.isoformat(timespec="seconds"),
                "ended": datetime.now(UTC).isoformat(timespec="seconds"),
                "memory_baseline_nbytes": baseline,
                "memory_peak_nbytes": peak_nbytes(ready.machine.device),
                **_hub_use(hub, measuring.seconds_waited),
            },
            measuring.diagnoses.tables([s.label for s in plan.subjects if s.label in measured]),
        )


@dataclass(frozen=True, eq=False)
class _Job:
    """All passes of one subject."""

    tasks: tuple[Task, ...]

    @property
    def subject(self) -> Subject:
        return self.tasks[0].subject

    @property
    def label(self) -> str:
        return self.subject.label

    @property
    def needs(self) -> Subject:
        """What has to be on the disk: its weights, and quantized files beside them."""
        return with_shipped(self.subject, [one for task in self.tasks for one in task.shipped])

    def diagnosed(self, event: Measured) -> Task | None:
        """Return what diagnostics look at: the subject, or the soup that a search ended with."""
        if event.search is None:
            return self.tasks[0]
        soup = event.search.subject
        return None if soup is None else replace(self.tasks[0], subject=soup)

    def at(self, folder: Callable[[Checkpoint], Path], merged: SummedWeights | None) -> _Job:
        """Return the job with the place of its weights."""
        return _Job(tuple(replace(t, folder=folder, merged=merged) for t in self.tasks))


@dataclass(eq=False)
class _Left:
    """What results on disk leave to do."""

    jobs: dict[tuple[str, ...], _Job] = field(default_factory=dict)  # by the keys of results
    twins: list[tuple[_Job, _Job]] = field(default_factory=list)  # with the first of equal keys
    stored: dict[str, Measured] = field(default_factory=dict)  # jobs that lack a diagnostic
    releases: list[Subject] = field(default_factory=list)


class Measuring:
    """Measures tasks, subject by subject; a race calls it for each round."""

    def __init__(
        self,
        prepared: Prepared,
        machine: Machine,
        watch: Watch,
        store: ResultStore | None = None,
        series: Sequence[Subject] = (),
    ) -> None:
        """Use a machine; results go to `evidence/` unless a store is given.

        `series` is all subjects of the plan, where only a part of them is visited.
        """
        self._prepared, self._machine, self._watch = prepared, machine, watch
        self._series = series
        self._store = store or ResultStore(prepared.out / "evidence", own_cache() / "evidence")
        self._store.remove_stale_files()
        self.diagnoses = Diagnoses((), (), machine, self._store)
        self.seconds_waited = 0.0  # for downloads

    def visit(
        self, tasks: Sequence[Task], releases: Sequence[Subject] = ()
    ) -> Iterator[Measured | Failed | Compared]:
        """Measure every subject and compare every release, in the order of their downloads."""
        jobs = [_Job(tuple(some)) for _, some in groupby(tasks, lambda task: task.subject)]
        self._begin_diagnoses(jobs)
        left = _Left()
        yield from self._on_disk(jobs, releases, left)
        total = len(jobs) + len(left.releases)
        done = len(jobs) - len(left.jobs) - len(left.twins)
        pending = {job.label: job for job in left.jobs.values()}
        events: dict[str, Measured | Failed] = {}
        with self._downloads(left) as downloads:
            for subject in downloads.order:
                self._watch.subject(done, total, subject.label)
                if subject.is_release:
                    yield self._compare(subject, downloads)
                else:
                    job, stored = pending[subject.label], left.stored.get(subject.label)
                    events[job.label] = event = self._take(job, downloads, stored)
                    yield event
                done += 1
        for job, first in left.twins:
            yield self._twin(job, events[first.label])
        self._watch.subject(total, total, "")
        self.seconds_waited += downloads.seconds_waited

    def _on_disk(
        self, jobs: Sequence[_Job], releases: Sequence[Subject], left: _Left
    ) -> Iterator[Measured | Failed | Compared]:
        """Yield what needs no weights; add the rest to what is left."""
        for job in jobs:
            try:
                keys, event = self._find(job)
            except SourceError as error:
                yield Failed(job.label, error)
                continue
            if event is not None and self._is_diagnosed(job, event):
                yield event
            elif keys in left.jobs:
                left.twins.append((job, left.jobs[keys]))
            else:
                left.jobs[keys] = job
                left.stored |= {job.label: event} if event else {}
        for release in releases:
            difference = compare_stored(release, self._store.folder)
            if difference is None:
                left.releases.append(release)
            else:
                yield Compared(release, difference)

    def _begin_diagnoses(self, jobs: Sequence[_Job]) -> None:
        recipe = self._prepared.plan.recipe
        self.diagnoses = Diagnoses(
            parse_diagnostics(recipe.diagnostics),
            self._series or [job.subject for job in jobs],
            self._machine,
            self._store,
            recipe.confidence,
        )

    def _downloads(self, left: _Left) -> Downloads:
        out, hub, plan = self._prepared.out, self._prepared.hub, self._prepared.plan
        budget = None if plan.traffic is None else plan.traffic.nbytes_disk_budget
        return Downloads(
            hub,
            [*(job.needs for job in left.jobs.values()), *left.releases],
            others=[job.needs for job, _ in left.twins],
            # the texts are downloaded beside the weights
            disk_budget_nbytes=budget and budget - missing_nbytes(plan.texts),
            record=out / RECORD_FILE,
            sums=Sums(out / SUMS_FOLDER, allow_pickle=self._machine.allow_pickle),
        )

    # ------------------------------------------------------------------------- one subject

    def _find(self, job: _Job) -> tuple[tuple[str, ...], Measured | None]:
        """Return the keys of a job's results, and the results if all of them are on disk."""
        if job.subject.is_search:
            result = search_stored(job.tasks, self._machine, self._store)
            return (job.label,), None if result is None else _searched(job, result)
        found = [look_up(task, self._machine, self._store) for task in job.tasks]
        keys = tuple(key for one in found for key in one.keys.values())
        if not all(one.is_complete for one in found):
            return keys, None
        return keys, _measured(job, [one.results for one in found])

    def _is_diagnosed(self, job: _Job, event: Measured) -> bool:
        """Use the diagnostics on disk; return whether they are all there."""
        task = job.diagnosed(event)
        if task is not None and self.diagnoses.lacks(task):
            return False
        if task is not None:
            self.diagnoses.find(task)
        return True

    def _take(self, job: _Job, downloads: Downloads, stored: Measured | None) -> Measured | Failed:
        """Measure and diagnose a subject once its weights are on disk."""
        machine, store, progress = self._machine, self._store, self._watch.block
        try:
            with downloads.ready(job.needs) as merged:
                job = job.at(downloads.folder, merged)
                if job.subject.is_search:
                    event = _searched(job, search(job.tasks, machine, store, progress))
                else:
                    first, *others = job.tasks
                    observer = self.diagnoses.watch(first, progress)
                    results = [measure(first, machine, store, progress, observer)]
                    results += [measure(task, machine, store, progress) for task in others]
                    event = _measured(job, results)
                task = job.diagnosed(event)
                if task is not None:
                    self.diagnoses.take(task, progress)
                return event
        except SourceError as error:
            if stored is None:
                return Failed(job.label, error)
            self.diagnoses.fail(job.label, error.message)  # its losses were measured before
            return stored
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise MachineError(
                f"out of memory while measuring `{job.label}`; what was measured is kept",
                hint="lower `--stream-memory`, `--calibration-documents` or `--context`",
            ) from error

    def _twin(self, job: _Job, first: Measured | Failed) -> Measured | Failed:
        """Return what came of a subject whose weights are those of another one."""
        if isinstance(first, Failed):
            reason = f"its weights are those of `{first.label}`: {first.error.message}"
            return Failed(job.label, SourceError(reason, hint=first.error.hint))
        _, event = self._find(job)
        assert event is not None, "a twin's results are on disk under its first's keys"
        self.diagnoses.find(job.tasks[0])
        return event

    def _compare(self, release: Subject, downloads: Downloads) -> Compared | Failed:
        """Compare a release once its weights and its ingredients' are on disk."""
        try:
            with downloads.ready(release):
                difference = compare_weights(
                    release,
                    allow_pickle=self._machine.allow_pickle,
                    folder=downloads.folder,
                    progress=self._watch.block,
                )
        except SourceError as error:
            return Failed(release.label, error)
        store_difference(release, difference, self._store.folder, self._store.writer)
        return Compared(release, difference)


def _measured(job: _Job, results: Sequence[tuple[Filed, ...]]) -> Measured:
    """Return the results of a job's passes, those of perturbed ones apart."""
    passes = list(zip(job.tasks, results, strict=True))
    return Measured(
        job.label,
        tuple(one for task, some in passes if task.perturbed is None for one in some),
        tuple((task.perturbed, one) for task, some in passes if task.perturbed for one in some),
        failed=tuple(one for task in job.tasks for one in task.failed.items()),
    )


def _searched(job: _Job, result: SearchResult) -> Measured:
    return Measured(job.label, result.results, search=result)


def _hub_use(hub: Hub | None, seconds_waited: float) -> dict[str, Any]:
    """Return what was downloaded, for the record."""
    if hub is None:
        return {}
    return {
        "hub_calls": hub.client.calls,
        "hub_requests": hub.client.requests,
        "hub_nbytes_fetched": hub.fetcher.nbytes_fetched,
        "hub_nbytes_verified": hub.fetcher.nbytes_verified,
        "hub_seconds_waited": round(seconds_waited, 3),
    }
