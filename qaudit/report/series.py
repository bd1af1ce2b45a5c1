"""The course of a series: places of checkpoints, the main line, phases of the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from qaudit.core.series.course import on_trunk, place
from qaudit.diagnostics.registry import parts
from qaudit.report.soups import against
from qaudit.report.views import View
from qaudit.types import Interval, Subject


@dataclass(frozen=True)
class Axis:
    """The place of every checkpoint, and the unit."""

    name: str
    positions: dict[str, float]
    stage_ends: dict[str, float]


def pictures(view: View) -> list[tuple[str, str]]:
    """Return the name and the description of every picture that can be drawn."""
    names = []
    if len(view.checkpoints) > 1 and view.schemes:
        names.append(("trajectory", "Relative quantization error along the series"))
    if len(view.subjects) > 1 and view.schemes:
        names.append(("quantized", "Quantized loss against full-precision loss"))
    if any(against(view, soup) for soup in view.soups):
        names.append(("soups", "Soup minus ingredient, with intervals, under each scheme"))
    if len(view.subjects) > 1 and len(view.schemes) > 1:
        names.append(("pareto", "Loss of the best subject against bits per weight"))
    names += [(part.NAME, part.ALT) for part in parts("figure") if part.is_drawn(view)]
    return names


def axis(view: View) -> Axis:
    """Place checkpoints by tokens where all know theirs, else by step, else by their order."""
    places = place([s.first for s in view.checkpoints])
    positions = {s.label: x for s, x in zip(view.checkpoints, places.positions, strict=True)}
    ends: dict[str, float] = {}
    for subject in view.checkpoints:
        if (stage := subject.first.stage) is not None:
            ends[stage] = max(ends.get(stage, positions[subject.label]), positions[subject.label])
    return Axis(places.unit, positions, ends)


def trunk(view: View) -> tuple[Subject, ...]:
    """Return the checkpoints on the main line: of parallel ingredients, the longest one."""
    marked = on_trunk([s.first for s in view.checkpoints])
    return tuple(s for s, on in zip(view.checkpoints, marked, strict=True) if on)


def error_of(view: View, subject: Subject, scheme: str) -> Interval | None:
    """Return a subject's relative error under a scheme."""
    score = view.score(subject.label, scheme)
    return score.relative_error if score else None


def soup_position(where: Axis, k: int, of: int = 1) -> float:
    """Return a place a little after the last checkpoint: a soup is no later, only made of it."""
    low, high = min(where.positions.values()), max(where.positions.values())
    return high + min(0.045, 0.2 / of) * (k + 1) * (high - low)


@dataclass(frozen=True)
class Phase:
    """A part of the series in which the learning rate is held, falls, or rises."""

    name: str
    begin: float
    end: float


def phases(view: View, where: Axis) -> tuple[Phase, ...]:
    """Return where the learning rate is held, falls and rises, if it is known."""
    if not knows_rates(view):
        return ()
    points = [(where.positions[s.label], s.first.learning_rate or 0.0) for s in trunk(view)]
    joined: list[Phase] = []
    for (begin, before), (end, after) in pairwise(points):
        same = math.isclose(before, after, rel_tol=1e-6)
        name = "held" if same else "falls" if after < before else "rises"
        if joined and joined[-1].name == name:
            begin = joined.pop().begin
        joined.append(Phase(name, begin, end))
    return tuple(joined)


def knows_rates(view: View) -> bool:
    """Return whether the learning rate is known at every checkpoint of the main line."""
    rates = [s.first.learning_rate for s in trunk(view)]
    return len(rates) > 1 and all(rate is not None for rate in rates)
