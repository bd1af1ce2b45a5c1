"""Run experiments: train what is missing, scan each seed, and sum up what the seeds show.

Seeds go one after another, and the summary is written anew after each, so that a run that is
stopped leaves everything that was finished in a readable state.

    OUT/runs/                      every run, by its key, shared by all experiments
    OUT/text-VOCABULARY/           the text they are trained on
    OUT/NAME-SIZE/seed-N/          the audit of one seed, and `series/`, links to its checkpoints
    OUT/NAME-SIZE/summary.*        what the seeds show

**The runs** of an experiment at one size and seed are in an order to train them in, and have a
price.

A seed is an initialization and a data order. Forks of one state share their data order, so that
they differ only in what the experiment varies; and no fork sees the batches again that its parent
began with. Runs that several experiments need have the same key and are kept once.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml

from experiments.run import TrainingRun, schedule_of
from experiments.summary import write_summary
from experiments.table import Experiment, ExperimentSummary, RunTable, Size, place_of
from qaudit.audit import scan
from qaudit.core.schedules import Schedule
from qaudit.errors import RecipeError
from qaudit.families import FAMILY_FILE
from qaudit.saved.evidence import read_saved
from qaudit.version import __version__
from qaudit.whole import write_whole

CONFIDENCE = 0.95
CURVATURE = "curvature:probes=10:eigenvalues=0"  # the trace alone, in seconds for each model

Progress = Callable[[str, int, int, float], None]
"""Receives the run, its step, its steps, and the loss."""


@dataclass(frozen=True)
class LabRequest:
    """How experiments are run, and where to."""

    size: str
    seeds: int
    out: Path
    device: str = "auto"
    compiled: bool = False
    settings: tuple[str, ...] = ()  # `key=value` laid over the experiments' files

    @property
    def runs(self) -> Path:
        return self.out / "runs"

    def folder(self, experiment: Experiment) -> Path:
        return self.out / f"{experiment.name}-{self.size}"

    def seed_folder(self, experiment: Experiment, seed: int) -> Path:
        return self.folder(experiment) / f"seed-{seed}"

    def scanned(self, experiment: Experiment) -> list[int]:
        seeds = range(1, self.seeds + 1)
        return [s for s in seeds if (self.seed_folder(experiment, s) / "audit.json").is_file()]

    def command(self, experiment: Experiment) -> str:
        settings = "".join(f" --set {setting}" for setting in self.settings)
        compiled = " --compile" if self.compiled else ""
        return (
            f"python -m experiments run {experiment.name} --size {self.size} --seeds {self.seeds}"
            f"{settings}{compiled}"
        )


def prices(request: LabRequest, experiments: Sequence[Experiment]) -> Iterator[LabPrice]:
    """Yield the price of each experiment; a run that several share is counted once."""
    seeds = range(1, request.seeds + 1)
    counted: set[str] = set()
    for experiment in experiments:
        planned = [p for seed in seeds for p in planned_runs(experiment, request.size, seed)]
        yield price(
            experiment,
            request.size,
            [p for p in planned if p.run.key not in counted],
            runs_folder=request.runs,
            scanned=request.scanned(experiment),
            seeds=seeds,
        )
        counted |= {p.run.key for p in planned}


def run_seed(request: LabRequest, experiment: Experiment, seed: int, progress: Progress) -> None:
    planned = planned_runs(experiment, request.size, seed)
    train_missing(request, planned, progress)
    folder = request.seed_folder(experiment, seed)
    size = experiment.sizes[request.size]
    soups = [f"{s.label}={s.merge}({'+'.join(map(size.label, s.of))})" for s in experiment.soups]
    scan(
        str(link_series(planned, request.runs, folder / "series")),
        out=folder,
        schemes=list(size.schemes),
        checkpoints=[size.label(place) for place in experiment.scan],
        soups=soups,
        context=size.shape().context,
        bos="always",
        evaluation_documents=size.evaluation_documents,
        calibration_documents=size.calibration_documents,
        document_tokens=size.document_tokens,
        calibration_seed=seed,  # another seed also draws other calibration text
        repeats=1,
        diagnostics=[CURVATURE] if any(c.measure == "trace" for c in experiment.contrasts) else [],
        device=request.device,
    )
    sum_up(request, experiment)


def train_missing(request: LabRequest, planned: Sequence[PlannedRun], progress: Progress) -> None:
    """Train, in their order, the runs whose checkpoints do not all exist."""
    missing = [run for run in planned if not run.is_trained(request.runs)]
    if not missing:
        return
    from experiments.text import prepare
    from experiments.train import train  # imports torch: a price needs none

    vocabulary = missing[0].run.shape.vocabulary
    text = prepare(request.out / f"text-{vocabulary}", vocabulary=vocabulary)
    for run in missing:

        def show(step: int, loss: float, rate: float) -> None:
            progress(run.name, step, run.run.steps, loss)  # noqa: B023 - called within this turn

        device, compiled = request.device, request.compiled
        train(run.run, text, request.runs, device=device, compiled=compiled, progress=show)


def link_series(planned: Sequence[PlannedRun], runs: Path, folder: Path) -> Path:
    """Write a folder of links to the checkpoints, by their names in the experiment; return it.

    The family file beside them makes every run a stage, with its parent, schedule and tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.is_symlink() and old.readlink().is_relative_to(runs.absolute()):
            old.unlink()
    named: dict[str, TrainingRun] = {}
    for run in planned:
        for label, checkpoint in run.folders(runs).items():
            (folder / label).symlink_to(checkpoint.absolute(), target_is_directory=True)
        parent = run.run.parent and named[run.run.parent.key]
        named[run.run.key] = replace(run.run, name=run.name, parent=parent)
    from experiments.folder import family_table

    table = family_table("experiment", named.values())
    write_whole(folder / FAMILY_FILE, yaml.safe_dump(table, sort_keys=False))
    return folder


def sum_up(request: LabRequest, experiment: Experiment) -> ExperimentSummary:
    """Return what the seeds show that were measured, and write it."""
    from experiments.contrasts import MeasuredSeed, points_of, result_of

    size = experiment.sizes[request.size]
    names = {size.label(place): place for place in experiment.scan}
    subjects = (*experiment.scan, *(soup.label for soup in experiment.soups))
    seeds: dict[int, MeasuredSeed] = {}
    notes: list[str] = []
    parameters = documents = 0
    for seed in request.scanned(experiment):
        saved = read_saved(request.seed_folder(experiment, seed))
        parameters = parameters or saved.audit.plan.parameters
        rows = [row for row in saved.audit.diagnostics.curvature if row.part == "model"]
        seeds[seed] = MeasuredSeed(
            {(names.get(m.subject, m.subject), m.scheme): m.evidence for m in saved.measurements},
            {names.get(row.subject, row.subject): row.trace_elsewhere or row.trace for row in rows},
        )
        for (subject, scheme), evidence in seeds[seed].evidence.items():
            documents = documents or int(evidence.scored().sum())
            if not np.isfinite(evidence.nll_sum).all():
                notes.append(f"seed {seed}: the loss of `{subject}` under `{scheme}` is not finite")
        measured = {subject for subject, _ in seeds[seed].evidence}
        notes += [f"seed {seed}: `{s}` was not measured" for s in subjects if s not in measured]
    contrasts = experiment.contrasts_by_scheme()
    summary = ExperimentSummary(
        experiment=experiment.name,
        size=request.size,
        description=experiment.description,
        command=request.command(experiment),
        seeds=tuple(seeds),
        parameters=parameters,
        tokens=sum(run.tokens for run in planned_runs(experiment, request.size, 1)),
        documents=documents,
        confidence=CONFIDENCE,
        subjects=subjects,
        claims=experiment.claims,
        results=tuple(result_of(contrast, seeds, CONFIDENCE) for contrast in contrasts),
        points=tuple(p for seed in seeds for p in points_of(seed, seeds[seed], CONFIDENCE)),
        environment={"python": platform.python_version(), "qaudit": __version__},
        notes=tuple(notes),
    )
    write_summary(summary, request.folder(experiment))
    return summary


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
    places = [*experiment.scan, *(place for soup in experiment.soups for place in soup.of)]
    needed = {place_of(place)[0] for place in places}
    for table in reversed(experiment.runs):
        if table.name in needed and table.start is not None:
            needed.add(place_of(table.start)[0])
    for table in experiment.runs:
        if table.name not in needed:
            continue
        parent, fork_at = None, 0
        if table.start is not None:
            name, units = place_of(table.start)
            parent, fork_at = runs[name], size.steps(units)
        run = _run(experiment, table, size, seed, parent, fork_at)
        runs[table.name] = replace(run, name=run.key[:_KEY_LENGTH])
    return tuple(PlannedRun(name, run) for name, run in runs.items())


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
    try:
        return schedule_of(
            kind,
            rates,
            peak=size.peak if table.peak is None else table.peak,
            warmup=0 if is_fork else size.warmup_steps,
            end=table.units * size.unit_steps,
        )
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
    rate = size.tokens_per_second
    subjects = len(experiment.scan) + len(experiment.soups)
    scans = len(set(seeds) - set(scanned))
    measurements = scans * subjects * (1 + len(size.schemes))
    tokens = sum(run.tokens for run in missing)
    return LabPrice(
        runs=len(missing),
        runs_trained=len(distinct) - len(missing),
        tokens=tokens,
        tokens_per_second=rate,
        measurements=measurements,
        seconds=tokens / rate + measurements * size.seconds_per_measurement,
    )
