"""Which checkpoints of a series are measured.

`checkpoints` names them, each entry one of

    stage2-ingredient3-step23852    a name
    stage2-*-step1000               a glob of names
    stage1@100k..900k               those of a stage from step to step, both included
    stage1@100k..900k/50k           of those, the nearest to each multiple of 50,000 steps
    stage2-ingredient3@1k..         one ingredient; either end may be left open
    stage2@..                       a stage, or those that a glob names
    @..20k                          any stage
    @20k                            one step

with `k` and `M` for thousands and millions. What the entries name together (or everything) is
narrowed by `last` (so many, in the order of the series).

Of more than 16 checkpoints without a selection, `representatives` takes a few; `*` takes all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fnmatch import fnmatchcase

from qaudit.core.course import is_release
from qaudit.errors import UsageError
from qaudit.recipe.representatives import MOST_MEASURED, branches, representatives
from qaudit.support.keys import nearest
from qaudit.types import Checkpoint, Recipe

_RANGE = "write a range as `stage1@100k..900k/50k`: stage, first and last step, spacing"
_UNITS = {"": 1, "k": 1000, "m": 1_000_000}
_MOST_NAMES = 12


def select(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    if is_default_choice(recipe, checkpoints):
        return representatives(checkpoints)
    wanted = {c.label for entry in recipe.checkpoints for c in matching(entry, checkpoints)}
    chosen = [c for c in checkpoints if not recipe.checkpoints or c.label in wanted]
    return tuple(chosen if recipe.last is None else chosen[-recipe.last :])


def is_default_choice(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> bool:
    """Whether nothing is selected, and there are too many to measure them all."""
    selections = (recipe.checkpoints, recipe.last)
    return not any(selections) and len(checkpoints) > MOST_MEASURED


def matching(entry: str, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoint of this name, or all that match it as a range or a glob."""
    by_label = {c.label: c for c in checkpoints}
    if entry in by_label:
        return [by_label[entry]]
    if matches := [c for label, c in by_label.items() if fnmatchcase(label, entry)]:
        return matches
    if "@" in entry:
        return _range(entry).of(list(by_label.values()))
    if any(sign in entry for sign in "*?["):
        raise UsageError(f"no checkpoint matches `{entry}`", hint=_there_are(by_label))
    raise UsageError(f"there is no checkpoint `{entry}`", hint=_near(entry, list(by_label)))


def _near(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    return near if near.startswith("did you mean") else _there_are(known)


def _there_are(known: Iterable[str]) -> str:
    names = list(known)
    shown = names if len(names) <= _MOST_NAMES else [*names[: _MOST_NAMES - 2], "...", names[-1]]
    return f"there are: {', '.join(shown)}"


def _branches(checkpoint: Checkpoint) -> tuple[str, ...]:
    stage = checkpoint.stage or ""
    if checkpoint.ingredient is None:
        return (stage,)
    return (stage, f"{stage}-ingredient{checkpoint.ingredient}".removeprefix("-"))


@dataclass(frozen=True)
class _Range:
    """The steps `low` to `high` of a stage; with a spacing, the nearest to each multiple."""

    text: str
    stage: str
    low: int | None
    high: int | None
    spacing: int | None

    def of(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        of_stage = [
            c
            for c in checkpoints
            if not self.stage or any(fnmatchcase(name, self.stage) for name in _branches(c))
        ]
        if not of_stage:
            stages = list(dict.fromkeys(name for c in checkpoints for name in _branches(c) if name))
            if stages:
                hint = _near(self.stage, stages)
                raise UsageError(f"there is no stage `{self.stage}`", hint=hint)
            raise UsageError(
                f"there is no stage `{self.stage}`: no checkpoint has a known stage",
                hint="choose by name, as in `step1*`, or by steps alone, as in `@100k..900k`",
            )
        steps = sorted({c.step for c in of_stage if c.step is not None})
        if not steps:
            raise UsageError(
                f"`{self.text}` is a range of steps, and no step is known here",
                hint="choose by name; `qaudit series` shows what is known",
            )
        low, high = self.low or 0, steps[-1] if self.high is None else self.high
        inside = [c for c in of_stage if c.step is not None and low <= c.step <= high]
        if not inside:
            raise UsageError(
                f"no checkpoint is in `{self.text}`",
                hint=f"the steps there go from {steps[0]:,} to {steps[-1]:,}",
            )
        return inside if self.spacing is None else self._spaced(inside)

    def _spaced(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return, of each branch, the nearest to every multiple; of two names for a step one."""
        wanted: set[str] = set()
        for branch in branches(checkpoints):
            first = sorted(branch, key=is_release)  # a name with a step before `main`
            named = {c.step or 0: c for c in reversed(first)}
            steps = sorted(named)
            for before, step, after in zip([None, *steps], steps, [*steps[1:], None], strict=False):
                if self._is_nearest(before, step, after):
                    wanted.add(named[step].label)
        return [c for c in checkpoints if c.label in wanted]

    def _is_nearest(self, before: int | None, step: int, after: int | None) -> bool:
        """Whether a multiple is nearer to a step than to its neighbours.

        In the middle between two the earlier one is the nearer. Zero counts only where it is
        written; a range without an end holds a multiple beyond the last step.
        """
        spacing = self.spacing or 1
        lowest = spacing if self.low is None else -(-self.low // spacing) * spacing
        nearer = 0 if before is None else ((before + step) // 2 // spacing + 1) * spacing
        last = self.high if after is None else (step + after) // 2
        if self.high is not None and last is not None:
            last = min(last, self.high)
        return last is None or max(lowest, nearer) <= last


def _range(entry: str) -> _Range:
    stage, _, rest = entry.rpartition("@")
    number = r"[0-9]{1,15}(?:\.[0-9]{1,6})?[kKmM]?"
    match = re.fullmatch(rf"({number})?(\.\.)?({number})?(?:/({number}))?", rest)
    if match is None or not rest or not (match[1] or match[2]):
        raise UsageError(f"`{entry}` is neither a checkpoint nor a range", hint=_RANGE)
    low, high, spacing = (_steps(text, entry) for text in (match[1], match[3], match[4]))
    if not match[2]:
        high = low
    if low is not None and high is not None and high < low:
        raise UsageError(f"`{entry}` ends before it starts", hint=_RANGE)
    if spacing is not None and spacing < 1:
        raise UsageError(f"`{entry}` has no spacing", hint="leave `/0` out, or write `/50k`")
    return _Range(entry, stage, low, high, spacing)


def _steps(text: str | None, entry: str) -> int | None:
    if text is None:
        return None
    number = Decimal(text.rstrip("kKmM")) * _UNITS[text.lstrip("0123456789.").lower()]
    if number != int(number):
        raise UsageError(f"`{text}` in `{entry}` is no whole number of steps", hint=_RANGE)
    return int(number)
