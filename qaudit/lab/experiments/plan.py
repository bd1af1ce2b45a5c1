"""An experiment at one size and one seed -> the runs it needs, in an order in which they can go.

A seed is an initialization and an order of data. Forks of one state share the order of their
data, so that what differs between them is what the experiment varies; and no fork sees the
batches again that its parent began with. Runs that several experiments ask for have the same
key, by what changes their weights, and are kept once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qaudit.core.schedules import Schedule, build
from qaudit.errors import RecipeError
from qaudit.lab.experiments.table import Experiment, RunTable, Size, place_of
from qaudit.lab.run import Run

COUNTERS = ("end", "decay_start", "decay_length", "period", "warmup")
"""Parameters of schedules that are lengths, and stand in units in a file."""

NAME = 12
"""Characters of a key that name a run."""

APART = 100_000
"""Orders of data of one seed: its first run has `seed * APART`, a fork also its place."""


@dataclass(frozen=True)
class Training:
    """A run that an experiment needs, by the name that it has there.

    The run itself is called by its key, so that every experiment finds it under that name.
    """

    name: str
    run: Run

    @property
    def key(self) -> str:
        """Identify the run by what changes its weights."""
        return self.run.key

    @property
    def tokens(self) -> int:
        """Tokens that it is trained on."""
        return self.run.steps * self.run.tokens_per_step

    def folders(self, runs: Path) -> dict[str, Path]:
        """Return where its checkpoints lie, by the names that they have in the experiment."""
        steps = self.run.save_at
        return {f"{self.name}-step{step}": runs / self.run.label(step) for step in steps}


def trainings(experiment: Experiment, size_name: str, seed: int) -> tuple[Training, ...]:
    """Return the runs that are needed, each after the one it forks from."""
    size = experiment.sizes[size_name]
    runs: dict[str, Run] = {}
    for table in needed(experiment):
        parent, fork_at = None, 0
        if table.start is not None:
            name, units = place_of(table.start)
            parent, fork_at = runs[name], steps_of(units, size)
        run = _run(experiment, table, size, seed, parent, fork_at)
        runs[table.name] = replace(run, name=run.key[:NAME])
    return tuple(Training(name, run) for name, run in runs.items())


def needed(experiment: Experiment) -> Sequence[RunTable]:
    """Return the runs that something is measured of, and those that these start from."""
    places = [*experiment.scan, *(place for soup in experiment.soups for place in soup.of)]
    wanted = {place_of(place)[0] for place in places}
    for run in reversed(experiment.runs):
        if run.name in wanted and run.start is not None:
            wanted.add(place_of(run.start)[0])
    return [run for run in experiment.runs if run.name in wanted]


def _run(
    experiment: Experiment,
    table: RunTable,
    size: Size,
    seed: int,
    parent: Run | None,
    fork_at: int,
) -> Run:
    steps = steps_of(table.units, size)
    places = (place_of(place) for place in experiment.places())
    saved = {steps_of(units, size) for name, units in places if name == table.name}
    kept = {steps_of(units, size) for units in table.states}
    optional: dict[str, Any] = {} if table.sam is None else {"sam_rho": table.sam}
    return Run(
        name=table.name,
        shape=size.shape(),
        schedule=_schedule(experiment, table, size, is_fork=parent is not None),
        steps=steps,
        save_at=tuple(sorted(saved)),
        keep_at=tuple(sorted(kept)),
        batch=size.batch,
        accumulation=size.accumulate,
        seed=seed,
        order=seed * APART + fork_at,
        weight_decay=size.weight_decay if table.weight_decay is None else table.weight_decay,
        attention=size.attention,
        parent=parent,
        fork_at=fork_at,
        **optional,
    )


def _schedule(experiment: Experiment, table: RunTable, size: Size, *, is_fork: bool) -> Schedule:
    """Build a schedule of steps from one of units; only a run from the start is warmed up."""
    given = dict(table.schedule)
    kind = str(given.pop("kind", ""))
    given = {k: v * size.unit_steps if k in COUNTERS else v for k, v in given.items()}
    given.setdefault("peak", size.peak if table.peak is None else table.peak)
    given.setdefault("warmup", 0 if is_fork else size.warmup_steps)
    if kind in ("cosine", "linear", "oli"):
        given.setdefault("end", table.units * size.unit_steps)
    try:
        return build(kind, **given)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"experiment `{experiment.name}`, run `{table.name}`: `schedule`: {error}",
            hint="for example `{kind: linear}` or `{kind: sgdr, period: 1}`, lengths in units",
        ) from error


def steps_of(units: float, size: Size) -> int:
    """Return how many steps some units have."""
    return round(units * size.unit_steps)


def label_of(place: str, size: Size) -> str:
    """Return the name of the checkpoint at a place."""
    name, units = place_of(place)
    return f"{name}-step{steps_of(units, size)}"


def is_trained(training: Training, runs: Path) -> bool:
    """Say whether all checkpoints of a run are there."""
    return all((f / "config.json").is_file() for f in training.folders(runs).values())
