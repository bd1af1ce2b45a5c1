"""The family's file of a folder of runs: what a checkpoint's name means, and its learning rate.

A run is a stage whose steps count from the end of what it forks from; its averages are stages of
their own with the same steps. Runs called `X-ingredientN` that fork from one point are the
ingredients of one stage `X`. The schedules are those that were run, so that `qaudit scan` needs
no option to know the learning rate of every checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from qaudit.core.schedules import spell
from qaudit.families import FAMILY_FILE, Family
from qaudit.lab.records import runs_in
from qaudit.lab.run import Run
from qaudit.whole import write_whole

_INGREDIENT = re.compile(r"(?P<stage>.+)-ingredient(?P<number>[0-9]+)")


def write_family(out: Path) -> Path:
    """Write the family's file for all runs that were begun in a folder."""
    table = family_table(out.resolve().name, runs_in(out))
    Family.model_validate(table)
    path = out / FAMILY_FILE
    head = "# Written by `qaudit lab`: what the runs in this folder are.\n"
    write_whole(path, head + yaml.safe_dump(table, sort_keys=False, width=100))
    return path


def family_table(name: str, runs: Iterable[Run]) -> dict[str, Any]:
    """Return the family's file of runs, as YAML has it."""
    known = _with_parents(runs)
    stages: dict[str, dict[str, Any]] = {}
    for run in known:
        stage = _stage_name(run, known)
        if stage in stages:
            stages[stage]["lr"] += _rates(run, stage)
            stages[stage]["end_step"] = max(stages[stage]["end_step"], run.steps)
            continue
        stages[stage] = _stage(run, stage, known)
    for run in known:
        for average in run.averages:
            stage = f"{run.name}-{average}"
            stages[stage] = _stage(run, stage, known)
    for table in stages.values():
        table["lr"] = _same_for_all(table["lr"])
    contexts = {run.context for run in known}
    return {
        "family": f"lab-{name}",
        "description": "Runs of `qaudit lab`, with the schedules they were trained by.",
        "dtype": "bfloat16",
        **({"context": contexts.pop()} if len(contexts) == 1 else {}),
        "stages": list(stages.values()),
    }


def _with_parents(runs: Iterable[Run]) -> list[Run]:
    """Return the runs by name, each behind what it forks from."""
    found: dict[str, Run] = {}

    def add(run: Run) -> None:
        if run.parent is not None and run.parent.name not in found:
            add(run.parent)
        found[run.name] = run

    for run in sorted(runs, key=lambda run: run.name):
        add(run)
    return list(found.values())


def _stage_name(run: Run, known: list[Run]) -> str:
    """Return the stage of a run: that of all ingredients, where they are ingredients of one."""
    match = _INGREDIENT.fullmatch(run.name)
    if match is None or any(other.name == match["stage"] for other in known):
        return run.name
    same = [other for other in known if other.name.startswith(f"{match['stage']}-ingredient")]
    points = {(_origin(other), other.fork_at, other.tokens_per_step) for other in same}
    return match["stage"] if len(points) == 1 else run.name


def _origin(run: Run) -> str | None:
    return run.parent.name if run.parent else None


def _stage(run: Run, stage: str, known: list[Run]) -> dict[str, Any]:
    grouped = stage != run.name and _INGREDIENT.fullmatch(run.name) and stage in run.name
    is_group = bool(grouped) and run.name.startswith(f"{stage}-ingredient")
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


def _rates(run: Run, stage: str) -> list[dict[str, Any]]:
    rate: dict[str, Any] = {**spell(run.schedule), "units": "steps"}
    match = _INGREDIENT.fullmatch(run.name)
    if match is not None and match["stage"] == stage:
        rate["ingredients"] = [int(match["number"])]
    return [rate]


def _same_for_all(rates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out whose a learning rate is, where all ingredients have one schedule."""
    bare = [{k: v for k, v in rate.items() if k != "ingredients"} for rate in rates]
    return bare[:1] if all(rate == bare[0] for rate in bare) else rates
