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
from qaudit.executors.records import read_record
from qaudit.hub import open_hub
from qaudit.items.prepare import fetch_items
from qaudit.planning.pins import NUMERICS, default_threads, pinned_libraries
from qaudit.planning.prepare import Prepared
from qaudit.saved.exports import kept_files
from qaudit.saved.parts import (
    evidence_of,
    last_round,
    one_writer,
    read_round,
    read_run,
    unit_path,
    write_unit,
)
from qaudit.text.hub_texts import fetch_texts
from qaudit.types import SILENT, Corpus, Pins, Run, Watch, units_of
from qaudit.whole import partial_name


def pin(prepared: Prepared, threads: int | None = None) -> Run:
    """Write what every process that measures a part of the plan must agree on."""
    from qaudit.executors.ready import read_text  # imports torch

    pinned_libraries(map(parse_scheme, prepared.plan.specs))  # refused before a text is read
    with one_writer(prepared.out):
        prepared.write_plan()
    corpus = read_text(prepared.plan, prepared.options, prepared.hub)
    return pinned(prepared, corpus, threads or default_threads())


def pinned(prepared: Prepared, corpus: Corpus, threads: int) -> Run:
    """Write a plan with the text that was read for it, and return both."""
    plan, options = prepared.plan, prepared.options
    pins = Pins(
        threads=threads,
        libraries=pinned_libraries(
            map(parse_scheme, plan.specs), (subject.merge for subject in plan.subjects)
        ),
        numerics=NUMERICS,
        text_sha256=tuple(draw.sha256 for draw in corpus.draws),
        items_sha256=dict(corpus.items_sha256),
        self_check=options.self_check,
    )
    with one_writer(prepared.out):
        prepared.write_plan(pins)
    return Run(plan, pins)


@dataclass(frozen=True)
class Fetched:
    """What a plan needs of the Hub, and what of it is in the cache now."""

    checkpoints: int
    whole: int  # of these, in the cache
    texts: int
    failed: dict[str, str]  # why, by label


def fetch_all(out: Path, *, code: bool = False, watch: Watch = SILENT) -> Fetched:
    """Download texts, configurations, tokenizers and weights; a failure does not end the others."""
    run = read_run(out)
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
    other = read_run(source)
    if other.identity != run.identity:
        raise UsageError(
            f"`{source}` was measured by another plan than `{out}`",
            hint="copy the folder of the plan to each place, and run the parts there",
        )
    copied = 0
    for number in range(1, last_round(out) + 1):
        for unit in units_of(read_round(run, out, number)):
            mine, copy = read_record(run, out, unit), read_record(run, source, unit)
            is_measured = mine is not None and mine.document.error is None
            if copy is not None and not is_measured:
                for name in dict.fromkeys(evidence_of(copy.document)):
                    _copy(source / name, out / name)
                write_unit(copy.document, unit_path(run, unit, out))
                copied += 1
    for path in kept_files(source):
        if not (there := out / path.relative_to(source)).exists():
            _copy(path, there)
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
