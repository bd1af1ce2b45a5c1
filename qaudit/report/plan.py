"""A plan as text: what will be measured, and what it will cost."""

from __future__ import annotations

from qaudit.report.format import plural
from qaudit.types import Plan


def render_plan(plan: Plan) -> str:
    """Render a plan in a few lines of plain text."""
    soups = sum(subject.kind == "soup" for subject in plan.subjects)
    checkpoints = len(plan.subjects) - soups
    what = plural(checkpoints, "checkpoint")
    if soups:
        what += f" and {plural(soups, 'soup')}"
    lines = [
        f"plan     {what}, {plural(len(plan.specs), 'scheme')} and full precision: "
        f"{plan.passes} streams",
        f"model    {_count(plan.parameters)} parameters, {plan.blocks} blocks, "
        f"{plan.dtype} on {plan.device}, context {plan.context}",
        f"read     {_size(plan.nbytes_read)} of weights",
        f"memory   about {_size(plan.nbytes_memory)} above the libraries, "
        f"{_size(plan.nbytes_memory_available)} free",
        f"time     {_time(plan.seconds_low)} to {_time(plan.seconds_high)}",
    ]
    return "\n".join([*lines, *(f"note     {text}" for text in plan.notes)])


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _size(nbytes: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1e3:.0f} kB"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
