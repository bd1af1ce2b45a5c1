"""Fit what error to expect to every run that docs/science publishes.

python -m experiments.expected
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from experiments.plan import planned_runs
from experiments.run import TrainingRun
from experiments.science import SIZE, summaries
from experiments.table import place_of, read_experiment
from experiments.types import ExperimentSummary
from qaudit.core.expected import FILE, Expectations, fit, signals

FEWEST_RUNS = 10  # fewer tell little of how runs differ

Point = tuple[str, float, float, float]  # the first run, tokens by parameter, decayed part, error


def tokens_at(run: TrainingRun, step: int) -> int:
    """Count the tokens of a run and of its parents up to a step."""
    before = tokens_at(run.parent, run.fork_at) if run.parent else 0
    return before + step * run.tokens_per_step


def root_of(run: TrainingRun) -> str:
    """Identify the run that others were forked from: they are left out together."""
    return root_of(run.parent) if run.parent else run.key


def points(summary: ExperimentSummary) -> Iterator[tuple[str, Point]]:
    """Yield the scheme and the point of each checkpoint on a run; soups are on none."""
    experiment = read_experiment(summary.experiment)
    size = experiment.sizes[SIZE]
    for point in summary.points:
        if point.subject not in experiment.scan:
            continue
        name, units = place_of(point.subject)
        runs = {planned.name: planned.run for planned in planned_runs(experiment, SIZE, point.seed)}
        run, step = runs[name], size.steps(units)
        decayed = 1 - run.schedule.at(step) / run.schedule.peak
        tokens = tokens_at(run, step) / summary.parameters
        yield point.scheme, (root_of(run), tokens, decayed, point.interval.estimate)


def fitted() -> Expectations:
    """Fit every scheme's line to the runs of all summaries, each checkpoint once."""
    by_scheme: dict[str, set[Point]] = defaultdict(set)
    published = [summary for summary in summaries().values() if summary is not None]
    for summary in published:
        for scheme, point in points(summary):
            by_scheme[scheme].add((*point[:3], round(point[3], 6)))
    every = [point for of_scheme in by_scheme.values() for point in of_scheme]
    errors = []
    for scheme in sorted(by_scheme):
        names, tokens, decayed, values = zip(*sorted(by_scheme[scheme]), strict=True)
        if len(set(names)) < FEWEST_RUNS:
            continue
        signals_NF = np.array([signals(t, d) for t, d in zip(tokens, decayed, strict=True)])
        errors.append(fit(scheme, np.array(names), signals_NF, np.array(values)))
    tokens_seen = [point[1] for point in every]
    return Expectations(
        published[0].parameters, (min(tokens_seen), max(tokens_seen)), tuple(errors)
    )


def rounded(value: object) -> object:
    """Round what another library's least squares may move."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    FILE.write_text(json.dumps(rounded(asdict(fitted())), indent=1) + "\n", encoding="utf-8")
