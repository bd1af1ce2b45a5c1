"""What an executor yields, and what an executor is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from qaudit.errors import SourceError
from qaudit.judge.released import WeightDifference
from qaudit.saved.results import Filed, SearchResult
from qaudit.types import Diagnostics, Pass, Perturbation, Plan, Subject

RETRY_TASK = "run the same command again, or leave the task out of `--tasks`"


@dataclass(frozen=True, eq=False)
class Started:
    """The text is read and the machine is ready; `protocol` is what the text was cut by."""

    protocol: dict[str, Any]


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


@dataclass(frozen=True, eq=False)
class Ended:
    """Every pass is done or failed."""

    environment: dict[str, Any]
    diagnostics: Diagnostics = field(default_factory=Diagnostics)


Event = Started | Measured | Failed | Compared | Ended


class Executor(Protocol):
    """Runs passes."""

    def execute(self, plan: Plan, passes: Sequence[Pass]) -> Iterator[Event]:
        """Run passes of a plan; what fails for one subject does not end the others."""


def one_error(failed: Mapping[str, SourceError]) -> SourceError:
    """Make one error of the errors of all subjects; a single one is raised as it is."""
    first = next(iter(failed.values()))
    if len(failed) == 1:
        return first
    reasons = "; ".join(f"`{label}`: {error.message}" for label, error in failed.items())
    return SourceError(f"nothing could be measured: {reasons}", hint=first.hint)
