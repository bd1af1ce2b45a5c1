"""What came of the subjects of a round, and what an executor is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qaudit.errors import SourceError
from qaudit.judge.released import WeightDifference
from qaudit.saved.results import Filed, SearchResult
from qaudit.types import SILENT, Perturbation, Run, Subject, Watch, WorkUnit

RETRY_TASK = "run the same command again, or leave the task out of `--tasks`"


@dataclass(frozen=True, eq=False)
class Measured:
    """All passes of a subject are done: its results, draw by draw, and those of perturbed ones."""

    label: str
    results: tuple[Filed, ...]
    perturbed: tuple[tuple[Perturbation, Filed], ...] = ()
    search: SearchResult | None = None  # of a greedy soup
    failed: tuple[tuple[str, SourceError], ...] = ()  # schemes that could not be measured
    elsewhere: tuple[tuple[str, Filed], ...] = ()  # again, on other kinds of devices


@dataclass(frozen=True, eq=False)
class Failed:
    """A subject that could not be measured, or a release that could not be compared."""

    label: str
    error: SourceError


@dataclass(frozen=True, eq=False)
class Compared:
    """A released soup beside the one its ingredients give."""

    release: Subject
    difference: WeightDifference

    @property
    def label(self) -> str:
        return self.release.label


Event = Measured | Failed | Compared


@dataclass(eq=False)
class Executor:
    """Has units measured. This one has nothing measured: parts run elsewhere, or did."""

    run: Run
    out: Path
    watch: Watch = SILENT

    def await_units(self, number: int, units: Sequence[WorkUnit]) -> None:
        """Return when the units of a round have records, or cannot have any now."""


def one_error(failed: Mapping[str, SourceError]) -> SourceError:
    """Make one error of the errors of all subjects; a single one is raised as it is."""
    first = next(iter(failed.values()))
    if len(failed) == 1:
        return first
    reasons = "; ".join(f"`{label}`: {error.message}" for label, error in failed.items())
    return SourceError(f"nothing could be measured: {reasons}", hint=first.hint)
