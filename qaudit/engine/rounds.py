"""Every subject of a plan in its turn: found on disk, or fetched and measured, or skipped.

What is on disk is found before anything is fetched, so that a scan which only has to be judged
again asks the Hub for no weights. Subjects with the same weights, configuration and schemes
are one measurement under several names: one of them is measured and the others find it there;
where it fails they fail with it. A search for a soup is one subject here, whose candidates are
on the disk together; it ends with the soup, or with none. Whatever order subjects are measured
in, results are returned in the order of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.diagnostics.diagnostic import Diagnostic
from qaudit.diagnostics.driver import Diagnoses
from qaudit.downloads.downloads import Downloads
from qaudit.downloads.sums import SUMS_FOLDER, Sums
from qaudit.engine.block_pass import Progress
from qaudit.engine.measure import measure
from qaudit.engine.tasks import Machine, Task, look_up
from qaudit.errors import MachineError, SourceError
from qaudit.judge.released import Difference
from qaudit.model.allocator import is_out_of_memory
from qaudit.saved.results import Filed, ResultStore
from qaudit.search.released import compare, compared_before, keep
from qaudit.search.searching import Searched, searched, searched_before
from qaudit.types import Diagnostics, Subject
from qaudit.types.watch import Watch

if TYPE_CHECKING:
    from qaudit.hub import Hub


@dataclass(frozen=True)
class Origin:
    """Where weights come from that are not on this machine, and how much of its disk they take."""

    hub: Hub | None = None
    disk_budget_nbytes: int | None = None
    record: Path | None = None  # downloads of this scan that are not evicted yet


NOWHERE = Origin()


@dataclass(frozen=True)
class Beside:
    """What is asked beside the losses of subjects."""

    releases: tuple[Subject, ...] = ()  # compared with the soups that they are said to be
    diagnostics: tuple[Diagnostic, ...] = ()  # of every subject
    confidence: float = 0.95  # of their intervals


NOTHING = Beside()


@dataclass(frozen=True)
class Outcome:
    """What was measured and what failed, in the order of the plan."""

    filed: tuple[Filed, ...]
    failed: Mapping[str, SourceError]
    seconds_waited: float = 0.0  # for the network, by the engine
    searched: Mapping[str, Searched] = field(default_factory=dict)  # by the label of the search
    released: tuple[tuple[Subject, Difference], ...] = ()
    not_compared: Mapping[str, SourceError] = field(default_factory=dict)
    diagnostics: Diagnostics = field(default_factory=Diagnostics)


def measure_all(
    tasks: Sequence[Task],
    machine: Machine,
    store: ResultStore,
    watch: Watch,
    origin: Origin = NOWHERE,
    beside: Beside = NOTHING,
) -> Outcome:
    """Measure subject after subject; what fails for its own reasons is skipped."""
    diagnoses = Diagnoses(beside.diagnostics, tasks, machine, store, beside.confidence)
    rounds = _Rounds(tasks, machine, store, diagnoses)
    releases = beside.releases
    compared = _Releases(releases, machine, store)
    done = len(tasks) - len(rounds.first) - len(rounds.twins)
    total = len(tasks) + len(compared.left)
    with Downloads(
        origin.hub,
        [*(task.subject for task in rounds.first.values()), *compared.left],
        others=[rounds.tasks[label].subject for label in rounds.twins],
        disk_budget_nbytes=origin.disk_budget_nbytes,
        record=origin.record,
        sums=_sums(origin, machine),
    ) as downloads:
        for subject in downloads.order:
            watch.subject(done, total, subject.label)
            if subject.is_release:
                compared.take(subject, downloads, watch.block)
            else:
                rounds.take(subject.label, downloads, watch.block)
            done += 1
    rounds.take_twins()
    watch.subject(total, total, "")
    return replace(
        rounds.outcome(downloads.seconds_waited),
        released=tuple((r, compared.found[r]) for r in releases if r in compared.found),
        not_compared={r.label: compared.failed[r] for r in releases if r in compared.failed},
    )


class _Releases:
    """What is known of released soups, as one after another is compared."""

    def __init__(self, releases: Sequence[Subject], machine: Machine, store: ResultStore) -> None:
        """Find what was compared before."""
        self._machine, self._folder = machine, store.folder
        before = {release: compared_before(release, store.folder) for release in releases}
        self.found = {release: one for release, one in before.items() if one is not None}
        self.left = [release for release in releases if release not in self.found]
        self.failed: dict[Subject, SourceError] = {}

    def take(self, release: Subject, downloads: Downloads, progress: Progress) -> None:
        """Compare a release as soon as its weights and those of its ingredients are there."""
        try:
            with downloads.ready(release):
                self.found[release] = found = compare(
                    release,
                    allow_pickle=self._machine.allow_pickle,
                    folder=downloads.folder,
                    progress=progress,
                )
        except SourceError as error:
            self.failed[release] = error
        else:
            keep(release, found, self._folder)


def _sums(origin: Origin, machine: Machine) -> Sums | None:
    """Return the folder of running sums, if members do not fit on the disk together."""
    if origin.record is None:
        return None
    return Sums(origin.record.parent / SUMS_FOLDER, allow_pickle=machine.allow_pickle)


class _Rounds:
    """What is known of each subject by its label, as one after another is measured."""

    def __init__(
        self, tasks: Sequence[Task], machine: Machine, store: ResultStore, diagnoses: Diagnoses
    ) -> None:
        """Find what is on disk, and which subjects are one measurement."""
        self._machine, self._store, self._diagnoses = machine, store, diagnoses
        self.tasks = {task.subject.label: task for task in tasks}
        self.first: dict[tuple[str, ...], Task] = {}  # what is to be measured, by its keys
        self.twins: dict[str, str] = {}  # label -> the label under which it is measured
        self._filed: dict[str, tuple[Filed, ...]] = {}
        self._failed: dict[str, SourceError] = {}
        self._searched: dict[str, Searched] = {}
        for label, task in self.tasks.items():
            try:
                if task.subject.is_search:
                    self._look_for(task)
                    continue
                standing = look_up(task, machine, store)
            except SourceError as error:
                self._failed[label] = error
                continue
            keys = tuple(standing.keys.values())
            if standing.complete:
                self._filed[label] = standing.measured
            if standing.complete and not diagnoses.lacks(task):
                diagnoses.find(task)
            elif keys in self.first:
                self.twins[label] = self.first[keys].subject.label
            else:
                self.first[keys] = task

    def _look_for(self, task: Task) -> None:
        """Go the way of a search on what is on disk; leave it to its turn where that ends."""
        found = searched_before(task, self._machine, self._store)
        if found is not None:
            self._end(task.subject.label, found)
        soup = None if found is None else _ended(task, found)
        if found is None or (soup is not None and self._diagnoses.lacks(soup)):
            self.first[task.subject.label,] = task
        elif soup is not None:
            self._diagnoses.find(soup)

    def _end(self, label: str, found: Searched) -> None:
        self._searched[label], self._filed[label] = found, found.filed

    def take(self, label: str, downloads: Downloads, progress: Progress) -> None:
        """Measure a subject as soon as its weights are there."""
        task = replace(self.tasks[label], folder=downloads.folder)
        try:
            with downloads.ready(task.subject) as merged:
                task = replace(task, merged=merged)
                self._measure(task, progress)
        except SourceError as error:
            if label in self._filed:  # measured before: its weights were wanted to diagnose it
                self._diagnoses.fail(label, error.message)
            else:
                self._failed[label] = error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise MachineError(
                f"out of memory while measuring `{label}`; what was measured is kept",
                hint="lower `--stream-memory`, `--calibration-documents` or `--context`",
            ) from error

    def _measure(self, task: Task, progress: Progress) -> None:
        """Measure a subject whose weights are there, and diagnose it."""
        label = task.subject.label
        if not task.subject.is_search:
            watch = self._diagnoses.watch(task, progress)
            self._filed[label] = measure(task, self._machine, self._store, progress, watch)
            self._diagnoses.take(task, progress)
            return
        found = searched(task, self._machine, self._store, progress)
        self._end(label, found)
        if (soup := _ended(task, found)) is not None:
            self._diagnoses.take(soup, progress)

    def take_twins(self) -> None:
        """Give what was measured to all who share it, and what failed too."""
        for label, first in self.twins.items():
            if first in self._failed:
                error = self._failed[first]
                self._failed[label] = SourceError(
                    f"its weights are those of `{first}`: {error.message}", hint=error.hint
                )
            else:
                standing = look_up(self.tasks[label], self._machine, self._store)
                self._filed[label] = standing.measured
                self._diagnoses.find(self.tasks[label])

    def outcome(self, seconds_waited: float) -> Outcome:
        """Return everything in the order of the plan."""
        measured = [label for label in self.tasks if label in self._filed]
        return Outcome(
            filed=tuple(f for label in self.tasks for f in self._filed.get(label, ())),
            failed={label: self._failed[label] for label in self.tasks if label in self._failed},
            seconds_waited=seconds_waited,
            searched=self._searched,
            diagnostics=self._diagnoses.tables(measured),
        )


def _ended(task: Task, found: Searched) -> Task | None:
    """Return the soup that a search ended with as a task; None: it stays at one checkpoint."""
    return None if found.subject is None else replace(task, subject=found.subject)
