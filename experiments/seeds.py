"""Run experiments: train what is missing, scan each seed, and sum up what the seeds show.

Seeds go one after another, and the summary is written anew after each, so that a run that is
stopped leaves everything that was finished in a readable state.

    OUT/runs/                      every run, by its key, shared by all experiments
    OUT/text-VOCABULARY/           the text they are trained on
    OUT/NAME-SIZE/seed-N/          the audit of one seed, and `series/`, links to its checkpoints
    OUT/NAME-SIZE/summary.*        what the seeds show
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from experiments.plan import LabPrice, PlannedRun, planned_runs, price, save_rate
from experiments.run import TrainingRun
from experiments.summary import write_summary
from experiments.table import Experiment
from experiments.types import ExperimentSummary
from qaudit.audit import scan
from qaudit.families import FAMILY_FILE
from qaudit.saved.audits import read_audit
from qaudit.saved.evidence import read_saved
from qaudit.whole import write_whole

if TYPE_CHECKING:
    from experiments.text import TokenStream

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
        diagnostics=[CURVATURE] if experiment.measures_curvature else [],
        device=request.device,
    )
    sum_up(request, experiment)


def train_missing(request: LabRequest, planned: Sequence[PlannedRun], progress: Progress) -> None:
    """Train, in their order, the runs whose checkpoints do not all exist."""
    missing = [run for run in planned if not run.is_trained(request.runs)]
    if not missing:
        return
    from experiments.train import train  # imports torch: a price needs none

    text = stream(request.runs, missing[0].run.shape.vocabulary)
    for run in missing:
        rates: list[float] = []

        def show(step: int, loss: float, rate: float) -> None:
            rates.append(rate)  # noqa: B023 - called within this turn of the loop
            progress(run.name, step, run.run.steps, loss)  # noqa: B023

        device, compiled = request.device, request.compiled
        train(run.run, text, request.runs, device=device, compiled=compiled, progress=show)
        if rates:
            save_rate(request.runs, request.size, rates[-1])


def stream(runs: Path, vocabulary: int) -> TokenStream:
    """Return the text that runs are trained on: one per size of vocabulary."""
    from experiments.text import prepare

    return prepare(runs.parent / f"text-{vocabulary}", vocabulary=vocabulary)


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
    from experiments.contrasts import MeasuredSeed, summarize

    size = experiment.sizes[request.size]
    names = {size.label(place): place for place in experiment.scan}

    def measured(seed: int) -> MeasuredSeed:
        saved = read_saved(request.seed_folder(experiment, seed))
        rows = [row for row in saved.audit.diagnostics.curvature if row.part == "model"]
        return MeasuredSeed(
            {(names.get(m.subject, m.subject), m.scheme): m.evidence for m in saved.measurements},
            {names.get(row.subject, row.subject): row.trace_elsewhere or row.trace for row in rows},
        )

    seeds = request.scanned(experiment)
    audits = (read_audit(request.seed_folder(experiment, seed)) for seed in seeds)
    summary = summarize(
        experiment,
        request.size,
        {seed: measured(seed) for seed in seeds},
        command=request.command(experiment),
        parameters=next((audit.plan.parameters for audit in audits), 0),
        tokens=sum(run.tokens for run in planned_runs(experiment, request.size, 1)),
    )
    write_summary(summary, request.folder(experiment))
    return summary
