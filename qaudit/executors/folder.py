"""The folder of a pinned plan: pinned, cut into parts, and filled from copies of it. No torch.

Units follow the order of the series, twins beside each other and soups behind the last of their
members; the line is cut where the largest part becomes smallest. A part is a stretch of the line,
so that only soups and the checkpoint before the first one need weights that another part has, too.
Where stretches cannot be even, because models of several sizes follow one another, the largest
units are dealt first, each to the part that is cheapest with it.
The same units and the same number of parts give the same cut in every process.

Results of copies are taken by content and never over anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qaudit.core.course import previous_of
from qaudit.core.registry import parse_scheme
from qaudit.diagnostics.registry import parse_diagnostics
from qaudit.errors import HubError, UsageError
from qaudit.executors.records import read_record
from qaudit.hub import open_hub
from qaudit.items.prepare import fetch_items
from qaudit.planning.pin import NUMERICS, pinned_libraries
from qaudit.planning.prepare import Prepared
from qaudit.saved import codec
from qaudit.saved.exports import kept_files
from qaudit.saved.parts import (
    evidence_of,
    last_round,
    one_writer,
    read_round,
    read_run,
    unit_path,
)
from qaudit.text.texts import fetch_texts
from qaudit.types import SILENT, Corpus, Pins, Run, Subject, Watch, WorkUnit, units_of
from qaudit.whole import copy_whole

FLOPS_PER_BYTE = 1e5
"""What reading a byte of weights costs, as arithmetic: a GPU does 100 TFLOP/s while 1 GB comes."""

UNEVEN = 1.1
"""A largest part so many times the lower bound is too large."""


def cost_of(unit: WorkUnit) -> float:
    return unit.flops + FLOPS_PER_BYTE * sum(checkpoint.nbytes for checkpoint in unit.checkpoints)


def in_line(units: Sequence[WorkUnit]) -> tuple[WorkUnit, ...]:
    """Return units with twins beside each other and soups behind the last of their members."""
    first: dict[str, int] = {}
    for place, unit in enumerate(units):
        for checkpoint in unit.checkpoints:
            if unit.subject.merge is None or checkpoint.content not in first:
                first.setdefault(checkpoint.content, place)

    def place_of(place: int) -> tuple[int, bool, int]:
        unit = units[place]
        last = max(first[checkpoint.content] for checkpoint in unit.checkpoints)
        return last, unit.subject.merge is not None, place

    return tuple(units[place] for place in sorted(range(len(units)), key=place_of))


def cut(
    units: Sequence[WorkUnit], count: int, series: Sequence[Subject] = ()
) -> tuple[tuple[WorkUnit, ...], ...]:
    """Cut units into at most so many parts, the largest of which is as small as can be.

    Diagnostics of a unit read the checkpoint before in the series, too.
    """
    groups: dict[str, list[WorkUnit]] = {}
    for unit in in_line(units):
        groups.setdefault(unit.subject.content, []).append(unit)
    if not groups:
        return ()
    line = [_Group(group, series) for group in groups.values()]
    costs = [line_cost([group]) for group in line]
    low, high = max(costs), sum(costs)
    for _ in range(60):  # to the last bit of a float
        middle = (low + high) / 2
        if len(_stretches(line, middle)) <= count:
            high = middle
        else:
            low = middle
    parts = _stretches(line, high)
    bound = max(line_cost(line) / count, *costs)
    if max(map(line_cost, parts)) > UNEVEN * bound:
        # Deal groups, the largest first, each to the part that is cheapest with it.
        dealt: list[list[int]] = [[] for _ in range(min(count, len(line)))]
        for place in sorted(range(len(line)), key=lambda place: -costs[place]):
            min(dealt, key=lambda part: line_cost([line[k] for k in (*part, place)])).append(place)
        of_dealt = [[line[place] for place in part] for part in sorted(map(sorted, dealt)) if part]
        parts = min(parts, of_dealt, key=lambda some: max(map(line_cost, some)))
    return tuple(tuple(unit for group in part for unit in group.units) for part in parts)


def parts_of(run: Run, units: Sequence[WorkUnit], count: int) -> tuple[tuple[WorkUnit, ...], ...]:
    diagnostics = parse_diagnostics(run.plan.recipe.diagnostics)
    reads = any(diagnostic.reads_previous for diagnostic in diagnostics)
    return cut(units, count, run.plan.subjects if reads else ())


class _Group:
    """Units that stay together: a subject and its twins, which share its measurements."""

    def __init__(self, units: Sequence[WorkUnit], series: Sequence[Subject]) -> None:
        self.units, self.flops = units, units[0].flops
        before = [previous_of(unit.subject, series) for unit in units]
        needed = [c for unit in units for c in unit.checkpoints] + [c for c in before if c]
        self.weights = {c.content: c.nbytes for c in needed}


def line_cost(groups: Sequence[_Group]) -> float:
    """Return the cost of groups one after another: weights that they share are read once."""
    weights = {content: nbytes for group in groups for content, nbytes in group.weights.items()}
    return sum(group.flops for group in groups) + FLOPS_PER_BYTE * sum(weights.values())


def _stretches(line: Sequence[_Group], limit: float) -> list[list[_Group]]:
    """Cut a line so that no part costs more than the limit, from the first unit on."""
    parts: list[list[_Group]] = []
    weights: dict[str, int] = {}
    cost = 0.0
    for group in line:
        new = {k: n for k, n in group.weights.items() if k not in weights}
        more = group.flops + FLOPS_PER_BYTE * sum(new.values())
        if not parts or cost + more > limit * (1 + 1e-12):
            parts.append([])
            weights, cost, more = {}, 0.0, line_cost([group])
        parts[-1].append(group)
        weights |= group.weights
        cost += more
    return parts


def pinned(prepared: Prepared, corpus: Corpus, threads: int) -> Run:
    """Write a plan with the text that was read for it, and return both."""
    plan = prepared.plan
    pins = Pins(
        threads=threads,
        libraries=pinned_libraries(
            map(parse_scheme, plan.specs), (subject.merge for subject in plan.subjects)
        ),
        numerics=NUMERICS,
        text_sha256=corpus.text_sha256,
        items_sha256=dict(corpus.items_sha256),
    )
    with one_writer(prepared.out):
        prepared.write_plan(pins)
    return Run(plan, pins)


def fetch_all(
    out: Path, *, code: bool = False, watch: Watch = SILENT
) -> tuple[int, int, int, dict[str, str]]:
    """Download texts, configurations, tokenizers and weights; a failure does not end the others.

    Returns how many checkpoints a plan needs of the Hub, how many of these are in the cache now,
    how many texts, and why others failed, by label.
    """
    run = read_run(out)
    plan = run.plan
    units = in_line(units_of(plan.passes))
    checkpoints = (source for unit in units for c in unit.checkpoints for source in c.sources)
    members = {c.content: c for c in checkpoints if c.commit}
    if not members and not plan.texts:
        return 0, 0, 0, {}
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
    return len(members), whole, len(plan.texts), failed


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
                    copy_whole(source / name, out / name)
                codec.write(unit_path(run, unit, out), copy.document)
                copied += 1
    for path in kept_files(source):
        if not (target := out / path.relative_to(source)).exists():
            copy_whole(path, target)
    return copied
