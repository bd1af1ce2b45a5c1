"""What `qaudit lab run` does once its options are parsed: price, train, scan, sum up.

The laboratory trains and the engine measures, and only the command line knows both. Seeds go one
after another, and the summary is written anew after each, so that a run that is stopped leaves
everything that was finished in a state to be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.cli.scanning import Request, going_on, scanned_as
from qaudit.cli.speech import Bars, note, print_result
from qaudit.errors import UsageError
from qaudit.lab.experiments.files import read_experiment
from qaudit.lab.experiments.plan import Training, label_of, trainings
from qaudit.lab.experiments.price import Price, price
from qaudit.lab.experiments.series import lay_out
from qaudit.lab.experiments.table import SIZES, Experiment
from qaudit.report.experiment import render_summary, summary_to_json, write_summary
from qaudit.report.folder import must_take_files
from qaudit.report.format import count, duration, plural
from qaudit.saved.saved import read_folder

if TYPE_CHECKING:
    from qaudit.lab.experiments.contrasts import Found
    from qaudit.types import ExperimentSummary

RUNS = "runs"


@dataclass(frozen=True)
class Asked:
    """The options of one `lab run`."""

    names: tuple[str, ...]
    size: str
    seeds: int
    out: Path
    device: str = "auto"
    compiled: bool = False
    dry_run: bool = False
    as_json: bool = False
    quiet: bool = False

    def folder(self, experiment: Experiment) -> Path:
        """Return where an experiment's cards and its summary lie."""
        return self.out / f"{experiment.name}-{self.size}"

    def seed_folder(self, experiment: Experiment, seed: int) -> Path:
        """Return where the audit of one seed lies."""
        return self.folder(experiment) / f"seed-{seed}"

    def command(self, experiment: Experiment) -> str:
        """Return the command that makes an experiment's figures."""
        compiled = " --compile" if self.compiled else ""
        return f"qaudit lab run {experiment.name} --size {self.size} --seeds {self.seeds}{compiled}"


def carry_out(asked: Asked) -> int:
    """Price and run experiments, seed by seed; return 3 where something was left unmeasured."""
    experiments = [read_experiment(name) for name in asked.names]
    if asked.size not in SIZES:
        raise UsageError(f"there is no size `{asked.size}`", hint=f"one of {', '.join(SIZES)}")
    _say_prices(asked, experiments)
    if asked.dry_run:
        return 0
    must_take_files(asked.out)
    with going_on(asked.out):
        for seed in range(1, asked.seeds + 1):
            for experiment in experiments:
                _carry_out_seed(asked, experiment, seed)
                summed_up(asked, experiment)
    summaries = [summed_up(asked, experiment) for experiment in experiments]
    for summary in summaries:
        print_result(summary_to_json(summary) if asked.as_json else render_summary(summary))
    whole = all(r.standing != "not measured" for s in summaries for r in s.results)
    return 0 if whole else 3


# ------------------------------------------------------------------------------------- the price


def _say_prices(asked: Asked, experiments: Sequence[Experiment]) -> None:
    """Say what is left to do; a run that several experiments share is counted once."""
    seeds = range(1, asked.seeds + 1)
    counted: set[str] = set()
    for experiment in experiments:
        wanted = [t for seed in seeds for t in trainings(experiment, asked.size, seed)]
        scanned = [s for s in seeds if (asked.seed_folder(experiment, s) / "audit.json").is_file()]
        found = price(
            experiment,
            asked.size,
            [t for t in wanted if t.key not in counted],
            runs_folder=asked.out / RUNS,
            scanned=scanned,
            seeds=seeds,
        )
        counted |= {t.key for t in wanted}
        text = f"{experiment.name}: {experiment.description}\n  {_priced(found)}"
        if asked.dry_run:
            print_result(text)
        elif not asked.quiet:
            note(text)


def _priced(found: Price) -> str:
    there = f", {found.runs_there} are there" if found.runs_there else ""
    rate = "as measured here" if found.is_rate_measured else "expected; not measured here yet"
    return (
        f"{plural(found.runs, 'run')} to train{there}: {count(found.tokens)} tokens at "
        f"{found.tokens_per_second:,.0f} a second ({rate}); "
        f"{plural(found.measurements, 'measurement')}; about {duration(found.seconds)}"
    )


# ------------------------------------------------------------------------------------- one seed


def _carry_out_seed(asked: Asked, experiment: Experiment, seed: int) -> None:
    """Train what is missing and scan it; what is measured already is not measured again."""
    folder = asked.seed_folder(experiment, seed)
    wanted = trainings(experiment, asked.size, seed)
    _train(asked, wanted)
    series = lay_out(wanted, asked.out / RUNS, folder / "series")
    scanned_as(_request(asked, experiment, seed, series, folder))
    if not asked.quiet:
        note(f"{experiment.name}, seed {seed}: wrote {folder / 'card.md'}")


def _train(asked: Asked, wanted: Sequence[Training]) -> None:
    from qaudit.lab.experiments.training import train_missing  # imports torch

    with Bars(quiet=asked.quiet) as bars:

        def show(name: str, step: int, steps: int, loss: float) -> None:
            bars.training(name, step, steps, f"loss {loss:.3f}")

        train_missing(
            wanted,
            asked.out / RUNS,
            size=asked.size,
            compiled=asked.compiled,
            device=asked.device,
            progress=show,
        )


def _request(
    asked: Asked, experiment: Experiment, seed: int, series: Path, folder: Path
) -> Request:
    """Return the scan of one seed; another seed also draws other calibration text."""
    size = experiment.sizes[asked.size]

    def label(place: str) -> str:
        return label_of(place, size)

    soups = [f"{s.label}={s.merge}({'+'.join(map(label, s.of))})" for s in experiment.soups]
    recipe = {
        "targets": [str(series)],
        "schemes": list(size.schemes),
        "checkpoints": [label(place) for place in experiment.scan],
        "soup": soups,
        "context": size.context,
        "bos": "always",
        "evaluation_documents": size.evaluation_documents,
        "calibration_documents": size.calibration_documents,
        "document_tokens": size.document_tokens,
        "calibration_seed": seed,
        "device": asked.device,
    }
    return Request(recipe, out=folder, quiet=True)


# ---------------------------------------------------------------------------------- over seeds


def summed_up(asked: Asked, experiment: Experiment) -> ExperimentSummary:
    """Sum up every seed that was scanned, and write it as JSON, as Markdown and as a picture."""
    from qaudit.lab.experiments.summary import summarized

    found = {
        seed: _evidence(asked, experiment, seed)
        for seed in range(1, asked.seeds + 1)
        if (asked.seed_folder(experiment, seed) / "audit.json").is_file()
    }
    first = trainings(experiment, asked.size, 1)
    summary = summarized(
        experiment,
        asked.size,
        found,
        command=asked.command(experiment),
        parameters=_parameters(asked, experiment, found),
        tokens=sum(training.tokens for training in first),
    )
    write_summary(summary, asked.folder(experiment))
    return summary


def _parameters(asked: Asked, experiment: Experiment, seeds: Iterable[int]) -> int:
    found = (read_folder(asked.seed_folder(experiment, seed)).plan.parameters for seed in seeds)
    return next(found, 0)


def _evidence(asked: Asked, experiment: Experiment, seed: int) -> Found:
    """Return what was measured of a seed, by the names that the experiment uses."""
    from qaudit.saved.saved import read_saved

    size = experiment.sizes[asked.size]
    names = {label_of(place, size): place for place in experiment.scan}
    saved = read_saved(asked.seed_folder(experiment, seed))
    return {(names.get(m.subject, m.subject), m.scheme): m.evidence for m in saved.measurements}
