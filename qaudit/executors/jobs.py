"""The work on one subject, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qaudit.engine.tasks import Task
from qaudit.executors.events import Measured
from qaudit.planning.shipped import with_shipped
from qaudit.saved.results import Filed, SearchResult
from qaudit.types import Checkpoint, Subject


@dataclass(frozen=True, eq=False)
class Job:
    """All passes of one subject."""

    tasks: tuple[Task, ...]
    before: Checkpoint | None = None  # the checkpoint before, where a diagnostic reads it
    fetches_before: bool = False

    @property
    def subject(self) -> Subject:
        return self.tasks[0].subject

    @property
    def label(self) -> str:
        return self.subject.label

    @property
    def needs(self) -> Subject:
        """What has to be on the disk: its weights, and what is read beside them."""
        beside = [one for task in self.tasks for one in task.pass_.shipped]
        if self.before is not None and self.fetches_before:
            beside.append(self.before)
        return with_shipped(self.subject, beside)

    def diagnosed(self, event: Measured) -> Task | None:
        """Return what diagnostics look at: the subject, or the soup that a search ended with."""
        if event.search is None:
            return self.tasks[0]
        soup = event.search.subject
        return None if soup is None else self.tasks[0].changed(subject=soup)

    def at(self, folder: Callable[[Checkpoint], Path]) -> Job:
        tasks = tuple(replace(t, folder=folder) for t in self.tasks)
        return replace(self, tasks=tasks)


@dataclass(eq=False)
class Left:
    """What results on disk leave to do."""

    jobs: dict[tuple[str, ...], Job] = field(default_factory=dict)  # by what decides results
    twins: list[tuple[Job, Job]] = field(default_factory=list)  # with the first of equal results
    stored: dict[str, Measured] = field(default_factory=dict)  # jobs that lack a diagnostic
    releases: list[Subject] = field(default_factory=list)


def measured_of(job: Job, results: Sequence[tuple[Filed, ...]]) -> Measured:
    """Return the results of a job's passes, those of perturbed ones apart."""
    passes = list(zip(job.tasks, results, strict=True))
    return Measured(
        job.label,
        tuple(one for task, some in passes if task.perturbed is None for one in some),
        tuple((task.perturbed, one) for task, some in passes if task.perturbed for one in some),
        failed=tuple(one for task in job.tasks for one in task.failed.items()),
    )


def searched_of(job: Job, result: SearchResult) -> Measured:
    """Return the results of a search."""
    return Measured(job.label, result.results, search=result)
