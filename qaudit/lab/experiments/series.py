"""The checkpoints of one seed's runs as a series: links under the experiment's own names.

Runs are kept once and shared, under names that nobody reads. What is scanned is a folder of
links to their checkpoints, and a family file beside them with every run as a stage: where it
forked off, its true schedule, its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from qaudit.core.schedules import spell
from qaudit.families import FAMILY_FILE
from qaudit.lab.experiments.plan import Training


def lay_out(trainings: Sequence[Training], runs: Path, folder: Path) -> Path:
    """Make the folder of links and its family file anew; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.is_symlink():
            old.unlink()
    for training in trainings:
        for label, place in training.folders(runs).items():
            (folder / label).symlink_to(place.absolute(), target_is_directory=True)
    text = yaml.safe_dump(family_table(trainings), sort_keys=False)
    (folder / FAMILY_FILE).write_text(text, encoding="utf-8")
    return folder


def family_table(trainings: Sequence[Training]) -> dict[str, Any]:
    """Return what a family's file says of these runs."""
    first = trainings[0].run
    names = {training.key: training.name for training in trainings}
    return {
        "family": "lab",
        "description": "Runs of the laboratory.",
        "tokens_per_step": first.tokens_per_step,
        "context": first.shape.context,
        "dtype": "bfloat16",
        "stages": [_stage(training, names) for training in trainings],
    }


def _stage(training: Training, names: dict[str, str]) -> dict[str, Any]:
    run = training.run
    stage: dict[str, Any] = {
        "name": training.name,
        "pattern": rf"{re.escape(training.name)}-step(?P<step>\d+)",
        "lr": {**spell(run.schedule), "units": "steps"},
        "end_step": run.steps,
    }
    if run.parent is not None:
        stage["starts_after"] = f"{names[run.parent.key]}@{run.fork_at}"
    return stage
