"""What an experiment will cost, before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from qaudit.lab.experiments.plan import Training, is_trained
from qaudit.lab.experiments.table import Experiment
from qaudit.whole import write_whole

RATES = "rates.json"
"""Beside the runs: tokens per second as they were trained here, by size."""


@dataclass(frozen=True)
class Price:
    """What is left to train and to measure, and how long that takes."""

    runs: int
    runs_there: int
    tokens: int
    tokens_per_second: float
    is_rate_measured: bool
    measurements: int
    seconds: float


def price(
    experiment: Experiment,
    size_name: str,
    trainings: Sequence[Training],
    *,
    runs_folder: Path,
    scanned: Collection[int],
    seeds: Sequence[int],
) -> Price:
    """Price the runs that are not there, each once, and the scans of the seeds without one."""
    size = experiment.sizes[size_name]
    distinct = {training.key: training for training in trainings}
    missing = [t for t in distinct.values() if not is_trained(t, runs_folder)]
    measured = rates(runs_folder).get(size_name)
    rate = measured or size.tokens_per_second
    subjects = len(experiment.scan) + len(experiment.soups)
    left = len([seed for seed in seeds if seed not in scanned])
    measurements = left * subjects * (1 + len(size.schemes))
    tokens = sum(training.tokens for training in missing)
    return Price(
        runs=len(missing),
        runs_there=len(distinct) - len(missing),
        tokens=tokens,
        tokens_per_second=rate,
        is_rate_measured=measured is not None,
        measurements=measurements,
        seconds=tokens / rate + measurements * size.seconds_per_measurement,
    )


def rates(runs_folder: Path) -> dict[str, float]:
    """Return the rates that were measured here; none where the file is not whole."""
    try:
        found = json.loads((runs_folder / RATES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(k): float(v) for k, v in found.items()} if isinstance(found, dict) else {}


def keep_rate(runs_folder: Path, size_name: str, tokens_per_second: float) -> None:
    """Keep a rate for the next price."""
    kept = {**rates(runs_folder), size_name: round(tokens_per_second, 1)}
    write_whole(runs_folder / RATES, json.dumps(kept) + "\n")
