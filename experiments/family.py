"""The family file of a folder of runs: what a checkpoint's name means, and its learning rate.

A run is a stage whose steps count from the end of its parent; its averages are stages of their own
with the same steps. Runs named `X-ingredientN` that fork from one point are the ingredients of one
stage `X`. The schedules are those that were run, so that `qaudit scan` needs no option to know the
learning rate of every checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from experiments.folder import runs_in
from experiments.run import TrainingRun
from qaudit.core.schedules import spell
from qaudit.families import FAMILY_FILE, Family
from qaudit.whole import write_whole

_INGREDIENT = re.compile(r"(?P<stage>.+)-ingredient(?P<number>[0-9]+)")


def write_family(out: Path) -> None:
    table = family_table(out.resolve().name, runs_in(out))
    Family.model_validate(table)
    head = "# Written by `python -m experiments`: what the runs in this folder are.\n"
    write_whole(out / FAMILY_FILE, head + yaml.safe_dump(table, sort_keys=False, width=100))


def family_table(name: str, runs: Iterable[TrainingRun]) -> dict[str, Any]:
    all_runs = _with_parents(runs)
    stages: dict[str, dict[str, Any]] = {}
    for run in all_runs:
        stage = _stage_name(run, all_runs)
        if stage in stages:
            stages[stage]["lr"] += _rates(run, stage)
            stages[stage]["end_step"] = max(stages[stage]["end_step"], run.steps)
        else:
            stages[stage] = _stage(run, stage, all_runs)
    for run in all_runs:
        for average in run.averages:
            stage = f"{run.name}-{average}"
            stages[stage] = _stage(run, stage, all_runs)
    for table in stages.values():
        table["lr"] = _without_repetition(table["lr"])
    contexts = {run.context for run in all_runs}
    return {
        "family": f"lab-{name}",
        "description": "Runs of `python -m experiments`, with the schedules they were trained by.",
        "dtype": "bfloat16",
        **({"context": contexts.pop()} if len(contexts) == 1 else {}),
        "stages": list(stages.values()),
    }


def _with_parents(runs: Iterable[TrainingRun]) -> list[TrainingRun]:
    ordered: dict[str, TrainingRun] = {}

    def add(run: TrainingRun) -> None:
        if run.parent is not None and run.parent.name not in ordered:
            add(run.parent)
        ordered[run.name] = run

    for run in sorted(runs, key=lambda run: run.name):
        add(run)
    return list(ordered.values())


def _stage_name(run: TrainingRun, known: list[TrainingRun]) -> str:
    match = _INGREDIENT.fullmatch(run.name)
    if match is None or any(other.name == match["stage"] for other in known):
        return run.name
    siblings = [other for other in known if other.name.startswith(f"{match['stage']}-ingredient")]
    points = {
        (other.parent.name if other.parent else None, other.fork_at, other.tokens_per_step)
        for other in siblings
    }
    return match["stage"] if len(points) == 1 else run.name


def _stage(run: TrainingRun, stage: str, known: list[TrainingRun]) -> dict[str, Any]:
    match = _INGREDIENT.fullmatch(run.name)
    is_group = match is not None and match["stage"] == stage
    middle = r"-ingredient(?P<ingredient>\d+)" if is_group else ""
    table: dict[str, Any] = {
        "name": stage,
        "pattern": rf"{re.escape(stage)}{middle}-step(?P<step>\d+)",
        "lr": _rates(run, stage),
        "tokens_per_step": run.tokens_per_step,
        "end_step": run.steps,
    }
    if run.parent is not None:
        parent = next(other for other in known if other.name == run.parent.name)
        table["starts_after"] = f"{_stage_name(parent, known)}@{run.fork_at}"
    return table


def _rates(run: TrainingRun, stage: str) -> list[dict[str, Any]]:
    rate: dict[str, Any] = {**spell(run.schedule), "units": "steps"}
    match = _INGREDIENT.fullmatch(run.name)
    if match is not None and match["stage"] == stage:
        rate["ingredients"] = [int(match["number"])]
    return [rate]


def _without_repetition(rates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one rate where all ingredients share their schedule."""
    bare = [{k: v for k, v in rate.items() if k != "ingredients"} for rate in rates]
    return bare[:1] if all(rate == bare[0] for rate in bare) else rates
