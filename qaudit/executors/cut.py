"""Work cut into parts of equal cost that fetch each checkpoint as few times as possible. No torch.

Units follow the order of the series, twins beside each other and soups behind the last of their
members; the line is cut where the largest part becomes smallest. A part is a stretch of the line,
so that only soups and the checkpoint before the first one need weights that another part has, too.
Where stretches cannot be even, because models of several sizes follow one another, the largest
units are dealt first, each to the part that is cheapest with it.
The same units and the same number of parts give the same cut in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qaudit.core.course import previous_of
from qaudit.diagnostics.registry import parse_diagnostics
from qaudit.types import Checkpoint, Run, WorkUnit

FLOPS_PER_BYTE = 1e5
"""What reading a byte of weights costs, as arithmetic: a GPU does 100 TFLOP/s while 1 GB comes."""

UNEVEN = 1.1
"""A largest part so many times the lower bound is too large."""

Before = Callable[[WorkUnit], Checkpoint | None]
"""Returns the checkpoint that a unit's diagnostics read beside its own."""


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
    units: Sequence[WorkUnit], count: int, before: Before = lambda unit: None
) -> tuple[tuple[WorkUnit, ...], ...]:
    """Cut units into at most so many parts, the largest of which is as small as can be."""
    groups = _groups(in_line(units))
    if not groups:
        return ()
    line = [_Group(group, before) for group in groups]
    low, high = max(one.cost for one in line), sum(group.cost for group in line)
    for _ in range(60):  # to the last bit of a float
        middle = (low + high) / 2
        if len(_stretches(line, middle)) <= count:
            high = middle
        else:
            low = middle
    parts = _stretches(line, high)
    bound = max(line_cost(line) / count, max(group.cost for group in line))
    if max(map(line_cost, parts)) > UNEVEN * bound:
        parts = min(parts, _dealt(line, count), key=lambda some: max(map(line_cost, some)))
    return tuple(tuple(unit for group in part for unit in group.units) for part in parts)


def parts_of(run: Run, units: Sequence[WorkUnit], count: int) -> tuple[tuple[WorkUnit, ...], ...]:
    """Cut units of a plan into parts; a diagnostic may need the checkpoint before, too."""
    reads = any(
        diagnostic.reads_previous for diagnostic in parse_diagnostics(run.plan.recipe.diagnostics)
    )

    def before(unit: WorkUnit) -> Checkpoint | None:
        return previous_of(unit.subject, run.plan.subjects) if reads else None

    return cut(units, count, before)


class _Group:
    """Units that stay together: a subject and its twins."""

    def __init__(self, units: Sequence[WorkUnit], before: Before) -> None:
        self.units = units
        self.flops = units[0].flops  # twins share its measurements
        needed = [c for unit in units for c in (*unit.checkpoints, before(unit)) if c is not None]
        self.weights = {c.content: c.nbytes for c in needed}

    @property
    def cost(self) -> float:
        return self.flops + FLOPS_PER_BYTE * sum(self.weights.values())


def line_cost(groups: Sequence[_Group]) -> float:
    """Return the cost of groups one after another: weights that they share are read once."""
    weights = {content: nbytes for group in groups for content, nbytes in group.weights.items()}
    return sum(group.flops for group in groups) + FLOPS_PER_BYTE * sum(weights.values())


def _dealt(line: Sequence[_Group], count: int) -> list[list[_Group]]:
    """Deal groups, the largest first, each to the part that is cheapest with it."""
    parts: list[list[_Group]] = [[] for _ in range(min(count, len(line)))]
    for group in sorted(line, key=lambda one: -one.cost):
        parts[min(range(len(parts)), key=lambda k: line_cost([*parts[k], group]))].append(group)
    places = {id(group): place for place, group in enumerate(line)}
    ordered = [sorted(part, key=lambda one: places[id(one)]) for part in parts if part]
    return sorted(ordered, key=lambda part: places[id(part[0])])


def _groups(line: Sequence[WorkUnit]) -> list[list[WorkUnit]]:
    groups: dict[str, list[WorkUnit]] = {}
    for unit in line:
        groups.setdefault(unit.subject.content, []).append(unit)
    return list(groups.values())


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
            weights, cost, more = {}, 0.0, group.cost
        parts[-1].append(group)
        weights |= group.weights
        cost += more
    return parts
