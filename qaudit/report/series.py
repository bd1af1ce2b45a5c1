"""What the pictures show and where: positions, branches, who is left out. No matplotlib."""

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
    """Where every checkpoint stands, and in what unit."""

    name: str
    positions: dict[str, float]
    stage_ends: dict[str, float]


def pictures(view: View) -> list[tuple[str, str]]:
    """Return the name and the description of every picture that can be drawn."""
    found = []
    if len(view.checkpoints) > 1 and view.schemes:
        found.append(("trajectory", "Relative quantization error along the series"))
    if len(view.subjects) > 1 and view.schemes:
        found.append(("quantized", "Quantized loss against full-precision loss"))
    if any(against(view, soup) for soup in view.soups):
        found.append(("soups", "Soup minus ingredient, with intervals, under each scheme"))
    if len(view.subjects) > 1 and len(view.schemes) > 1:
        found.append(("pareto", "Loss of the best subject against bits per weight"))
    found += [(part.NAME, part.ALT) for part in parts("figure") if part.is_drawn(view)]
    return found


def axis(view: View) -> Axis:
    """Place checkpoints by tokens where all know theirs, else by step, else by their order."""
    found = place([s.first for s in view.checkpoints])
    return _axis(view, found.unit, list(found.positions))


def _axis(view: View, name: str, values: list[float]) -> Axis:
    positions = {s.label: x for s, x in zip(view.checkpoints, values, strict=True)}
    ends: dict[str, float] = {}
    for subject in view.checkpoints:
        if (stage := subject.first.stage) is not None:
            ends[stage] = max(ends.get(stage, positions[subject.label]), positions[subject.label])
    return Axis(name, positions, ends)


def trunk(view: View) -> tuple[Subject, ...]:
    """Return the checkpoints on the main line: of parallel ingredients, the longest one."""
    marked = on_trunk([s.first for s in view.checkpoints])
    return tuple(s for s, on in zip(view.checkpoints, marked, strict=True) if on)


def error_of(view: View, subject: Subject, scheme: str) -> Interval | None:
    """Return a subject's relative error under a scheme."""
    score = view.score(subject.label, scheme)
    return score.relative_error if score else None


def soup_position(where: Axis, k: int, of: int = 1) -> float:
    """Soups stand a little after the last checkpoint: they are no later, only made of it."""
    low, high = min(where.positions.values()), max(where.positions.values())
    return high + min(0.045, 0.2 / of) * (k + 1) * (high - low)


@dataclass(frozen=True)
class Phase:
    """A part of the series in which the learning rate is held, falls, or rises."""

    name: str
    begin: float
    end: float


def phases(view: View, where: Axis) -> tuple[Phase, ...]:
    """Read off the known rates where the learning rate is held, falls and rises."""
    if not knows_rates(view):
        return ()
    points = [(where.positions[s.label], s.first.learning_rate or 0.0) for s in trunk(view)]
    found: list[Phase] = []
    for (begin, before), (end, after) in pairwise(points):
        same = math.isclose(before, after, rel_tol=1e-6)
        name = "held" if same else "falls" if after < before else "rises"
        if found and found[-1].name == name:
            begin = found.pop().begin
        found.append(Phase(name, begin, end))
    return tuple(found)


def knows_rates(view: View) -> bool:
    """Say whether the learning rate is known at every checkpoint of the main line."""
    rates = [s.first.learning_rate for s in trunk(view)]
    return len(rates) > 1 and all(rate is not None for rate in rates)


def key(view: View) -> str:
    """Say what the marks of the first picture mean, as far as they occur."""
    level = f"{100 * view.audit.plan.recipe.confidence:g} %"
    said = [f"bands: {level} intervals over {view.unit}s"]
    if len(trunk(view)) < len(view.checkpoints):
        said.append("hollow: other ingredients")
    if view.soups:
        said.append("star: soup" if len(view.soups) == 1 else "stars: soups")
    if any(phase.name == "falls" for phase in phases(view, axis(view))):
        said.append("shaded: the learning rate falls")
    return "; ".join(said)


def stages_of(view: View) -> list[str | None]:
    """Return the stages in order, those without a name last."""
    stages = dict.fromkeys(s.first.stage for s in view.checkpoints)
    return sorted(stages, key=lambda stage: stage is None)


REACH = 1.15
"""Subjects with more than this times the best loss are left out of the second picture."""


def contenders(view: View) -> tuple[Subject, ...]:
    """Leave out subjects so far from the best that they would squeeze all others together."""
    scores = [(s, score) for s in view.subjects if (score := view.score(s.label))]
    best = min((score.ce.estimate for _, score in scores), default=0.0)
    return tuple(s for s, score in scores if score.ce.estimate <= REACH * best)


def alike(view: View, shown: tuple[Subject, ...]) -> bool:
    """Say whether the losses of all schemes fit one scale without being squeezed."""
    scores = [view.score(s.label, scheme) for s in shown for scheme in view.schemes]
    losses = [x.ce.estimate for x in scores if x is not None and math.isfinite(x.ce.estimate)]
    return bool(losses) and max(losses) < 1.4 * min(losses)


def spread_out(heights: dict[str, float], gap: float) -> dict[str, float]:
    """Move heights apart until neighbours differ by a gap, keeping their order and middle."""
    order = sorted(heights, key=heights.__getitem__)
    blocks: list[tuple[float, list[str]]] = []
    for name in order:
        middle, names = heights[name], [name]
        while blocks and middle - gap * (len(names) - 1) / 2 < (
            blocks[-1][0] + gap * (len(blocks[-1][1]) + 1) / 2
        ):
            _, before = blocks.pop()
            names = before + names
            middle = sum(heights[n] for n in names) / len(names)
        blocks.append((middle, names))
    return {
        name: middle + gap * (k - (len(names) - 1) / 2)
        for middle, names in blocks
        for k, name in enumerate(names)
    }


def inside(heights: dict[str, float], edge: float) -> dict[str, float]:
    """Move heights together until they lie between `edge` and one minus it, as far as they can."""
    if not heights:
        return {}
    low, high = min(heights.values()), max(heights.values())
    shift = max(0.0, edge - low) or min(0.0, 1 - edge - high)
    return {name: height + shift for name, height in heights.items()}
