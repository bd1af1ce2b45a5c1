"""The runs of an experiment at one size and seed, in an order to train them in, and their price.

A seed is an initialization and a data order. Forks of one state share their data order, so that
they differ only in what the experiment varies; and no fork sees the batches again that its parent
began with. Runs that several experiments need have the same key and are kept once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.run import TrainingRun
from experiments.table import Experiment, RunTable, Size, place_of
from qaudit.core.schedules import Schedule, build
from qaudit.errors import RecipeError
from qaudit.whole import write_whole

RATES = "rates.json"  # beside the runs: tokens per second as they were trained here, by size
_IN_UNITS = ("end", "decay_start", "decay_length", "period", "warmup")  # lengths of schedules
_KEY_LENGTH = 12  # characters of a key that name a run
_ORDERS_PER_SEED = 100_000  # data orders: a run from the start has the first, a fork `+ fork_at`


@dataclass(frozen=True)
class PlannedRun:
    """A run that an experiment needs, under its name there; the run itself is named by its key."""

    name: str
    run: TrainingRun

    @property
    def tokens(self) -> int:
        return self.run.steps * self.run.tokens_per_step

    def folders(self, runs: Path) -> dict[str, Path]:
        """Return the folders of its checkpoints by their names in the experiment."""
        steps = self.run.save_at
        return {f"{self.name}-step{step}": runs / self.run.label(step) for step in steps}

    def is_trained(self, runs: Path) -> bool:
        return all((f / "config.json").is_file() for f in self.folders(runs).values())


def planned_runs(experiment: Experiment, size_name: str, seed: int) -> tuple[PlannedRun, ...]:
    """Return the runs that are needed, each after its parent."""
    size = experiment.sizes[size_name]
    runs: dict[str, TrainingRun] = {}
    for table in _needed(experiment):
        parent, fork_at = None, 0
        if table.start is not None:
            name, units = place_of(table.start)
            parent, fork_at = runs[name], size.steps(units)
        run = _run(experiment, table, size, seed, parent, fork_at)
        runs[table.name] = replace(run, name=run.key[:_KEY_LENGTH])
    return tuple(PlannedRun(name, run) for name, run in runs.items())


def _needed(experiment: Experiment) -> Sequence[RunTable]:
    places = [*experiment.scan, *(place for soup in experiment.soups for place in soup.of)]
    names = {place_of(place)[0] for place in places}
    for run in reversed(experiment.runs):
        if run.name in names and run.start is not None:
            names.add(place_of(run.start)[0])
    return [run for run in experiment.runs if run.name in names]


def _run(
    experiment: Experiment,
    table: RunTable,
    size: Size,
    seed: int,
    parent: TrainingRun | None,
    fork_at: int,
) -> TrainingRun:
    places = (place_of(place) for place in experiment.places())
    return TrainingRun(
        name=table.name,
        shape=size.shape(),
        schedule=_schedule(experiment, table, size, is_fork=parent is not None),
        steps=size.steps(table.units),
        save_at=tuple(sorted({size.steps(units) for name, units in places if name == table.name})),
        keep_at=tuple(sorted({size.steps(units) for units in table.states})),
        batch=size.batch,
        accumulation=size.accumulate,
        seed=seed,
        order=seed * _ORDERS_PER_SEED + fork_at,
        weight_decay=size.weight_decay if table.weight_decay is None else table.weight_decay,
        attention=size.attention,
        parent=parent,
        fork_at=fork_at,
        sam_rho=table.sam or 0.0,
    )


def _schedule(experiment: Experiment, table: RunTable, size: Size, *, is_fork: bool) -> Schedule:
    rates = dict(table.schedule)
    kind = str(rates.pop("kind", ""))
    rates = {k: v * size.unit_steps if k in _IN_UNITS else v for k, v in rates.items()}
    rates.setdefault("peak", size.peak if table.peak is None else table.peak)
    rates.setdefault("warmup", 0 if is_fork else size.warmup_steps)
    if kind in ("cosine", "linear", "oli"):
        rates.setdefault("end", table.units * size.unit_steps)
    try:
        return build(kind, **rates)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"experiment `{experiment.name}`, run `{table.name}`: `schedule`: {error}",
            hint="for example `{kind: linear}` or `{kind: sgdr, period: 1}`, lengths in units",
        ) from error


@dataclass(frozen=True)
class LabPrice:
    """What remains to be trained and measured, and how long that takes."""

    runs: int
    runs_trained: int
    tokens: int
    tokens_per_second: float
    is_rate_measured: bool
    measurements: int
    seconds: float


def price(
    experiment: Experiment,
    size_name: str,
    planned: Sequence[PlannedRun],
    *,
    runs_folder: Path,
    scanned: Collection[int],
    seeds: Sequence[int],
) -> LabPrice:
    size = experiment.sizes[size_name]
    distinct = {run.run.key: run for run in planned}
    missing = [run for run in distinct.values() if not run.is_trained(runs_folder)]
    measured = rates(runs_folder).get(size_name)
    rate = measured or size.tokens_per_second
    subjects = len(experiment.scan) + len(experiment.soups)
    scans = len(set(seeds) - set(scanned))
    measurements = scans * subjects * (1 + len(size.schemes))
    tokens = sum(run.tokens for run in missing)
    return LabPrice(
        runs=len(missing),
        runs_trained=len(distinct) - len(missing),
        tokens=tokens,
        tokens_per_second=rate,
        is_rate_measured=measured is not None,
        measurements=measurements,
        seconds=tokens / rate + measurements * size.seconds_per_measurement,
    )


def rates(runs_folder: Path) -> dict[str, float]:
    try:
        saved = json.loads((runs_folder / RATES).read_text(encoding="utf-8"))
        return {str(k): float(v) for k, v in saved.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def save_rate(runs_folder: Path, size_name: str, tokens_per_second: float) -> None:
    saved = {**rates(runs_folder), size_name: round(tokens_per_second, 1)}
    write_whole(runs_folder / RATES, json.dumps(saved) + "\n")
