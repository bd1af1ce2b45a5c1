"""The checkpoints of one seed's runs as a series: links under the experiment's own names.

Runs are kept once and shared, under names that nobody reads. What is scanned is a folder of
links to their checkpoints, and a family file beside them, by which every run is a stage: where
it forked off, its true schedule, its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from qaudit.families import FAMILY_FILE
from qaudit.lab.experiments.plan import Training
from qaudit.lab.family import family_table
from qaudit.lab.run import Run
from qaudit.whole import write_whole


def lay_out(trainings: Sequence[Training], runs: Path, folder: Path) -> Path:
    """Make the folder of links and its family file anew; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.is_symlink():
            old.unlink()
    for training in trainings:
        for label, place in training.folders(runs).items():
            (folder / label).symlink_to(place.absolute(), target_is_directory=True)
    table = family_table("experiment", called_as_in_the_experiment(trainings))
    write_whole(folder / FAMILY_FILE, yaml.safe_dump(table, sort_keys=False))
    return folder


def called_as_in_the_experiment(trainings: Sequence[Training]) -> list[Run]:
    """Return the runs, and what they fork from, under the names that people read."""
    named: dict[str, Run] = {}
    for training in trainings:
        run = training.run
        parent = None if run.parent is None else named[run.parent.key]
        named[training.key] = replace(run, name=training.name, parent=parent)
    return list(named.values())
