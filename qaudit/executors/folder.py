"""The folder of a pinned plan: pinned, downloaded for, and filled from copies of it. No torch.

Results are copied by content and never over anything.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from qaudit.core.registry import parse_scheme
from qaudit.errors import HubError, UsageError, not_written
from qaudit.executors.cut import in_line
from qaudit.executors.on_disk import OnDisk, evidence_of
from qaudit.hub import open_hub
from qaudit.items.prepare import fetch_items
from qaudit.planning.pins import NUMERICS, default_threads, pinned_libraries
from qaudit.planning.prepare import Prepared
from qaudit.saved.parts import (
    last_round,
    read_round,
    read_run,
    read_unit,
    unit_path,
    write_run,
    write_unit,
)
from qaudit.saved.writer import one_writer
from qaudit.text.texts import fetch_texts
from qaudit.types import SILENT, Pins, Run, Watch, units_of
from qaudit.whole import partial_name


def pin(prepared: Prepared, threads: int | None = None) -> Run:
    """Write what every process that measures a part of the plan must agree on."""
    from qaudit.executors.ready import read_text  # imports torch

    plan, options = prepared.plan, prepared.options
    versions = pinned_libraries(
        map(parse_scheme, plan.specs), (subject.merge for subject in plan.subjects)
    )
    corpus = read_text(plan, options, prepared.hub)
    pins = Pins(
        threads=threads or default_threads(),
        libraries=versions,
        numerics=NUMERICS,
        text_sha256=tuple(draw.sha256 for draw in corpus.draws),
        items_sha256=dict(corpus.items_sha256),
        self_check=options.self_check,
        cross_check=options.cross_check,
    )
    pinned = Run(plan, pins)
    with one_writer(prepared.out):
        prepared.write_lock(always=True)
        return write_run(pinned, prepared.out)


@dataclass(frozen=True)
class Fetched:
    """What a plan needs of the Hub, and what of it is in the cache now."""

    checkpoints: int
    whole: int  # of these, in the cache
    texts: int
    failed: dict[str, str]  # why, by label


def fetch_all(out: Path, *, code: bool = False, watch: Watch = SILENT) -> Fetched:
    """Download texts, configurations, tokenizers and weights; a failure does not end the others."""
    run, _ = read_run(out)
    plan = run.plan
    units = in_line(units_of(plan.passes))
    members = {c.content: c for unit in units for c in unit.checkpoints if c.commit}
    if not members and not plan.texts:
        return Fetched(0, 0, 0, {})
    hub = open_hub(watch=watch)
    fetcher = hub.fetcher
    fetch_texts(fetcher, plan.recipe, plan.texts)
    tasks = fetch_items(hub, plan.recipe, plan.texts)
    failed = {f"task {task}": error.message for task, error in tasks.items()}
    for checkpoint in members.values():
        try:
            fetcher.settings(checkpoint, code=code)
            fetcher.weights(checkpoint)
        except HubError as error:
            failed[checkpoint.label] = error.message
    whole = len(members) - (len(failed) - len(tasks))
    return Fetched(len(members), whole, len(plan.texts), failed)


def merge(source: Path, out: Path, run: Run) -> int:
    """Copy the units that `out` lacks; returns how many. Both folders have the same plan."""
    other, _ = read_run(source)
    if other.identity != run.identity:
        raise UsageError(
            f"`{source}` was measured by another plan than `{out}`",
            hint="copy the folder of the plan to each place, and run the parts there",
        )
    here, there = OnDisk(run, out), OnDisk(run, source)
    copied = 0
    for number in range(1, last_round(out) + 1):
        for unit in units_of(read_round(run, out, number)):
            mine, document = read_unit(run, unit, out), read_unit(run, unit, source)
            whole = here.is_whole(unit, mine) and mine is not None and mine.error is None
            if not whole and document is not None and there.is_whole(unit, document):
                for name in dict.fromkeys(evidence_of(document)):
                    _copy(source / name, out / name)
                write_unit(document, unit_path(run, unit, out))
                copied += 1
    return copied


def _copy(source: Path, path: Path) -> None:
    partial = partial_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, partial)
        partial.replace(path)
    except OSError as error:
        raise not_written(path, error) from error
    finally:
        partial.unlink(missing_ok=True)
