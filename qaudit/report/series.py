"""A series as positions on an axis, and which pictures an audit has."""

from __future__ import annotations

from dataclasses import dataclass

from qaudit.report.views import View
from qaudit.types import Subject


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
    return found


def axis(view: View) -> Axis:
    """Place checkpoints by tokens where all know theirs, else by step, else by their order."""
    checkpoints = [(s.label, s.first) for s in view.checkpoints]
    tokens = [c.tokens for _, c in checkpoints if c.tokens is not None]
    steps = [c.step for _, c in checkpoints if c.step is not None]
    if len(tokens) == len(checkpoints) and len(set(tokens)) > 1:
        return _axis(view, "tokens", [float(t) for t in tokens])
    if len(steps) == len(checkpoints) and len(set(steps)) > 1:
        return _axis(view, "steps", _running(view, steps))
    return _axis(view, "checkpoints in order", [float(k) for k in range(1, len(checkpoints) + 1)])


def _axis(view: View, name: str, values: list[float]) -> Axis:
    positions = {s.label: x for s, x in zip(view.checkpoints, values, strict=True)}
    ends: dict[str, float] = {}
    for subject in view.checkpoints:
        if (stage := subject.first.stage) is not None:
            ends[stage] = max(ends.get(stage, positions[subject.label]), positions[subject.label])
    return Axis(name, positions, ends)


def _running(view: View, steps: list[int]) -> list[float]:
    """Let a stage whose steps count from zero again follow the one before."""
    offsets: dict[str | None, int] = {}
    placed: list[float] = []
    for subject, step in zip(view.checkpoints, steps, strict=True):
        stage = subject.first.stage
        if stage not in offsets:
            reached = int(max(placed, default=0))
            offsets[stage] = reached if step <= reached else 0
        placed.append(float(offsets[stage] + step))
    return placed


def trunk(view: View) -> tuple[Subject, ...]:
    """Return the checkpoints on the main line: of parallel ingredients, the longest one."""
    lengths: dict[int, int] = {}
    for subject in view.checkpoints:
        if (ingredient := subject.first.ingredient) is not None:
            lengths[ingredient] = lengths.get(ingredient, 0) + 1
    longest = max(lengths, key=lambda k: (lengths[k], -k)) if lengths else None
    return tuple(s for s in view.checkpoints if s.first.ingredient in (None, longest))
