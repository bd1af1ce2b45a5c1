"""Run passes in this process, one subject after another, each while its weights are on disk.

Results on disk are found before anything is downloaded, so that a scan which only has to be
judged again asks the Hub for no weights. Subjects with the same weights, configuration and
schemes are measured once; the others share the results, or the failure. A failure of one subject
does not end the audit. What was measured is on disk at once, so the same command resumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby

from qaudit.diagnostics.diagnostic import Diagnostic
from qaudit.diagnostics.driver import Diagnoses
from qaudit.diagnostics.previous import previous_of
from qaudit.diagnostics.registry import parse_diagnostics
from qaudit.downloads.downloads import Downloads
from qaudit.downloads.sources import RECORD_FILE
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Machine, Task, look_up
from qaudit.errors import MachineError, SourceError, is_out_of_memory
from qaudit.executors.events import RETRY_TASK, Compared, Ended, Event, Failed, Measured, Started
from qaudit.executors.jobs import Job, Left, measured_of, searched_of
from qaudit.executors.ready import Account, Ready, make_ready, protocol_of
from qaudit.planning.prepare import Prepared
from qaudit.planning.traffic import missing_nbytes
from qaudit.saved.results import ResultStore
from qaudit.search.greedy import search, search_stored
from qaudit.search.released import compare_stored, compare_weights, store_difference
from qaudit.types import SILENT, Pass, Plan, Subject, Watch


class InProcess:
    """The executor of one machine."""

    def __init__(self, prepared: Prepared, watch: Watch = SILENT) -> None:
        """Run what was prepared; `watch` is told how far it is."""
        self._prepared, self._watch = prepared, watch
        self._ready: Ready | None = None  # one text and one machine for every plan

    def execute(self, plan: Plan, passes: Sequence[Pass]) -> Iterator[Event]:
        began = datetime.now(UTC)
        hub = self._prepared.hub
        ready = self._ready = self._ready or make_ready(plan, self._prepared.options, hub)
        account = Account(ready.machine.device, hub, began)
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
            account.environment(measuring.seconds_waited),
            measuring.diagnoses.tables([s.label for s in plan.subjects if s.label in measured]),
        )


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

        `series` is all subjects of the plan, where only a part of them is visited: the checkpoint
        before one of them may then be fetched for diagnostics alone.
        """
        self._prepared, self._machine, self._watch = prepared, machine, watch
        self._series = series
        self._store = store or ResultStore(prepared.out / "evidence")
        self._store.remove_stale_files()
        self.diagnoses = Diagnoses((), (), machine, self._store)
        self.seconds_waited = 0.0  # for downloads

    def visit(
        self, tasks: Sequence[Task], releases: Sequence[Subject] = ()
    ) -> Iterator[Measured | Failed | Compared]:
        """Measure every subject and compare every release, in the order of their downloads."""
        groups = [tuple(some) for _, some in groupby(tasks, lambda task: task.subject)]
        diagnostics = parse_diagnostics(self._prepared.plan.recipe.diagnostics)
        series = self._series or [some[0].subject for some in groups]
        reads = any(one.reads_previous for one in diagnostics)
        jobs = [
            Job(some, previous_of(some[0].subject, series) if reads else None, bool(self._series))
            for some in groups
        ]
        self._begin_diagnoses(diagnostics, series)
        left = Left()
        yield from self._on_disk(jobs, releases, left)
        total = len(jobs) + len(left.releases)
        done = len(jobs) - len(left.jobs) - len(left.twins)
        pending = {job.label: job for job in left.jobs.values()}
        events: dict[str, Measured | Failed] = {}
        waited = self.seconds_waited
        with self._downloads(left) as downloads:
            for subject in downloads.order:
                passes = 1 if subject.is_release else len(pending[subject.label].tasks)
                self._watch.subject(done, total, subject.label, passes)
                if subject.is_release:
                    event: Measured | Failed | Compared = self._compare(subject, downloads)
                else:
                    job, stored = pending[subject.label], left.stored.get(subject.label)
                    event = events[job.label] = self._take(job, downloads, stored)
                self.seconds_waited = waited + downloads.seconds_waited
                yield event
                done += 1
        for job, first in left.twins:
            yield self._twin(job, events[first.label])
        self._watch.subject(total, total, "")

    def _on_disk(
        self, jobs: Sequence[Job], releases: Sequence[Subject], left: Left
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
                continue
            if job.before is not None:
                keys = (*keys, job.before.content)
            if keys in left.jobs:
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

    def _begin_diagnoses(
        self, diagnostics: Sequence[Diagnostic], series: Sequence[Subject]
    ) -> None:
        plan = self._prepared.plan
        self.diagnoses = Diagnoses(
            diagnostics,
            series,
            self._machine,
            self._store,
            plan.recipe.confidence,
            evicts=_budget_of(plan) is not None and not self._series,
        )

    def _downloads(self, left: Left) -> Downloads:
        out, hub, plan = self._prepared.out, self._prepared.hub, self._prepared.plan
        budget = _budget_of(plan)
        return Downloads(
            hub,
            [*(job.needs for job in left.jobs.values()), *left.releases],
            others=[job.needs for job, _ in left.twins],
            # the texts are downloaded beside the weights
            disk_budget_nbytes=budget and budget - missing_nbytes(plan.texts),
            record=out / RECORD_FILE,
        )

    # ------------------------------------------------------------------------- one subject

    def _find(self, job: Job) -> tuple[tuple[str, ...], Measured | None]:
        """Return the keys of a job's results, and the results if all of them are on disk."""
        if job.subject.is_search:
            result = search_stored(job.tasks, self._machine, self._store)
            return (job.label,), None if result is None else searched_of(job, result)
        found = [look_up(task, self._machine, self._store) for task in job.tasks]
        keys = tuple(key for one in found for key in one.keys.values())
        if not all(one.is_complete for one in found):
            return keys, None
        return keys, measured_of(job, [one.results for one in found])

    def _is_diagnosed(self, job: Job, event: Measured) -> bool:
        """Use the diagnostics on disk; return whether they are all there."""
        task = job.diagnosed(event)
        if task is not None and self.diagnoses.lacks(task):
            return False
        if task is not None:
            self.diagnoses.find(task)
        return True

    def _take(self, job: Job, downloads: Downloads, stored: Measured | None) -> Measured | Failed:
        """Measure and diagnose a subject once its weights are on disk."""
        machine, store, progress = self._machine, self._store, self._watch.block
        try:
            with downloads.ready(job.needs):
                job = job.at(downloads.folder)
                if job.subject.is_search:
                    event = searched_of(job, search(job.tasks, machine, store, progress))
                else:
                    first, *others = job.tasks
                    observer = self.diagnoses.watch(first, progress)
                    results = [measure(first, machine, store, progress, observer)]
                    results += [measure(task, machine, store, progress) for task in others]
                    event = measured_of(job, results)
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

    def _twin(self, job: Job, first: Measured | Failed) -> Measured | Failed:
        """Return what came of a subject whose weights are those of another one."""
        if isinstance(first, Failed):
            reason = f"its weights are those of `{first.label}`: {first.error.message}"
            return Failed(job.label, SourceError(reason, hint=first.error.hint))
        _, event = self._find(job)
        assert event is not None, "a twin's results are on disk under its first's keys"
        self.diagnoses.find(job.tasks[0], first.label)
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
        store_difference(release, difference, self._store.folder)
        return Compared(release, difference)


def _budget_of(plan: Plan) -> int | None:
    return None if plan.traffic is None else plan.traffic.nbytes_disk_budget
