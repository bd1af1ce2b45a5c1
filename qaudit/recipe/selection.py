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
Always chosen: the end of every stage, the end of every ingredient (they are what a soup is made
of), and the release, `main`. The rest, so that there are twelve besides the ends of ingredients,
is spread at equal steps of an arc over the run: its length grows with training progress (tokens,
else steps, as a share of the whole) and with every fall of the learning rate (as a share of its
peak). A held phase is thereby sampled evenly and a decay more densely, which is where
quantization error is known to move; a warm-up is not. Where no learning rate is known the arc
is progress alone.

Of parallel ingredients the longest is the run. Of two names for one place, or
for one commit, one is taken. Checkpoints that are suspect before anything was compared are
taken only where nothing else is left. What has no place in the run is not taken, except where
nothing has one. A second choice among the first takes all of it.

Given up: the first checkpoint, which is random weights more often than not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fnmatch import fnmatchcase

from qaudit.core.course import is_release, on_trunk
from qaudit.errors import UsageError
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
        return _range(entry, list(by_label.values()))
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


def _range(entry: str, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the steps of a stage from one to another; with a spacing, the nearest to each."""
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
    names = {c.label: _branches(c) for c in checkpoints}
    of_stage = [
        c for c in checkpoints
        if not stage or any(fnmatchcase(name, stage) for name in names[c.label])
    ]  # fmt: skip
    if not of_stage:
        stages = list(dict.fromkeys(name for c in checkpoints for name in names[c.label] if name))
        by_name = "choose by name, as in `step1*`, or by steps alone, as in `@100k..900k`"
        hint = _near(stage, stages) if stages else by_name
        raise UsageError(f"there is no stage `{stage}`", hint=hint)
    steps = sorted({c.step for c in of_stage if c.step is not None})
    if not steps:
        raise UsageError(
            f"`{entry}` is a range of steps, and no step is known here",
            hint="choose by name; `qaudit series` shows what is known",
        )
    last = steps[-1] if high is None else high
    inside = [c for c in of_stage if c.step is not None and (low or 0) <= c.step <= last]
    if not inside:
        raise UsageError(
            f"no checkpoint is in `{entry}`",
            hint=f"the steps there go from {steps[0]:,} to {steps[-1]:,}",
        )
    return inside if spacing is None else _spaced(inside, low, high, spacing)


def _spaced(
    checkpoints: Sequence[Checkpoint], low: int | None, high: int | None, spacing: int
) -> list[Checkpoint]:
    """Return, of each branch, the nearest to every multiple; of two names for a step one.

    In the middle between two steps the earlier one is the nearer. Zero counts only where it is
    written; a range without an end holds a multiple beyond the last step.
    """
    wanted: set[str] = set()
    lowest = spacing if low is None else -(-low // spacing) * spacing
    for branch in branches(checkpoints):
        first = sorted(branch, key=is_release)  # a name with a step before `main`
        named = {c.step or 0: c for c in reversed(first)}
        steps = sorted(named)
        for before, step, after in zip([None, *steps], steps, [*steps[1:], None], strict=False):
            nearer = 0 if before is None else ((before + step) // 2 // spacing + 1) * spacing
            last = high if after is None else (step + after) // 2
            if high is not None and last is not None:
                last = min(last, high)
            if last is None or max(lowest, nearer) <= last:
                wanted.add(named[step].label)
    return [c for c in checkpoints if c.label in wanted]


def _steps(text: str | None, entry: str) -> int | None:
    if text is None:
        return None
    number = Decimal(text.rstrip("kKmM")) * _UNITS[text.lstrip("0123456789.").lower()]
    if number != int(number):
        raise UsageError(f"`{text}` in `{entry}` is no whole number of steps", hint=_RANGE)
    return int(number)


MOST_MEASURED = 16
"""A series of at most so many checkpoints is measured whole where none are named."""

REPRESENTATIVES = 12
"""The number that is measured of a longer one, besides the ends of its ingredients."""


def representatives(checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    distinct = _first_names(
        checkpoints,
        lambda c: (c.ref.location, c.commit, c.ref.subfolder) if c.commit else c.label,
    )
    in_run = [c for c in distinct if c.step is not None or c.tokens is not None]
    placed = _first_names(in_run or distinct, _point)
    ends = {c.label for c in _ends(placed) if c.ingredient is not None}
    rest = [c.label for c in _ends(placed) if c.ingredient is None]
    rest = [label for label in rest if label not in ends]
    rest += [c.label for c in distinct if is_release(c) and not c.suspect and c.label not in rest]
    most, count = REPRESENTATIVES, len(rest)
    if count > most:  # evenly, with both ends
        rest = [rest[k * (count - 1) // (most - 1)] for k in range(most)]
    fixed = ends | set(rest)
    room = REPRESENTATIVES - len(fixed - ends)
    trunk = [c for c, on in zip(placed, on_trunk(placed), strict=True) if on]
    arc = _arc(trunk)
    for candidates in ([c for c in trunk if not c.suspect], trunk):
        open_ = [c.label for c in candidates if c.label not in fixed]
        chosen = _spread(arc, fixed, open_, room)
        room -= len(chosen)
        fixed |= chosen
    return tuple(c for c in checkpoints if c.label in fixed)


def _first_names(
    checkpoints: Sequence[Checkpoint], key: Callable[[Checkpoint], object]
) -> list[Checkpoint]:
    """Return one of those that a key is equal for, a release only where it is alone."""
    names: dict[object, Checkpoint] = {}
    for c in sorted(checkpoints, key=is_release):
        names.setdefault(key(c), c)
    labels = {c.label for c in names.values()}
    return [c for c in checkpoints if c.label in labels]


def _point(c: Checkpoint) -> object:
    """Return the place of a checkpoint in the run; without one it equals no other."""
    if c.step is None and c.tokens is None:
        return c.label
    return (c.stage, c.ingredient, c.tokens if c.step is None else None, c.step)


def branches(checkpoints: Iterable[Checkpoint]) -> list[list[Checkpoint]]:
    """Return the checkpoints of each stage and ingredient."""
    groups: dict[tuple[str | None, int | None], list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        groups.setdefault((checkpoint.stage, checkpoint.ingredient), []).append(checkpoint)
    return list(groups.values())


def _ends(placed: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the last of each stage and ingredient that is not suspect, if there is one."""
    clean = ([c for c in branch if not c.suspect] for branch in branches(placed))
    return [branch[-1] for branch in clean if branch]


def _arc(trunk: Sequence[Checkpoint]) -> dict[str, float]:
    """Return how far along the arc each checkpoint of the main line is; zero is its start."""
    progress = _progress(trunk)
    whole = max(progress, default=0.0) or 1.0
    peak = max((c.learning_rate or 0.0 for c in trunk), default=0.0) or 1.0
    arc, length, before, rate = {}, 0.0, 0.0, None
    for checkpoint, at in zip(trunk, progress, strict=True):
        length += max(0.0, at - before) / whole
        now = checkpoint.learning_rate
        if rate is not None and now is not None:
            length += max(0.0, rate - now) / peak
        before, rate = at, rate if now is None else now
        arc[checkpoint.label] = length
    return arc


def _progress(trunk: Sequence[Checkpoint]) -> list[float]:
    """Return tokens where all are known, else steps, counted on through stages; else the order."""
    counted = [c.tokens for c in trunk]
    if None in counted:
        counted = [c.step for c in trunk]
    if None in counted:
        return [float(k) for k in range(1, len(trunk) + 1)]
    offsets: dict[str | None, int] = {}
    reached, progress = 0, []
    for checkpoint, tokens in zip(trunk, counted, strict=True):
        count = tokens or 0
        if checkpoint.stage not in offsets:  # a stage may count from zero again
            offsets[checkpoint.stage] = reached if count <= reached else 0
        progress.append(float(offsets[checkpoint.stage] + count))
        reached = max(reached, offsets[checkpoint.stage] + count)
    return progress


def _spread(
    arc: Mapping[str, float], fixed: set[str], candidates: Sequence[str], room: int
) -> set[str]:
    """Choose so many candidates that the gaps of the arc between all chosen are alike."""
    gaps: list[tuple[float, float, list[str]]] = []  # where it starts, how long, which are inside
    start, inside, wanted = 0.0, list[str](), set(candidates)
    for label, at in arc.items():
        if label in fixed:
            gaps.append((start, at - start, inside))
            start, inside = at, []
        elif label in wanted:
            inside.append(label)
    gaps.append((start, max(arc.values(), default=0.0) - start, inside))
    counts = [0] * len(gaps)
    for _ in range(min(room, len(candidates))):
        wide = [
            (length / (counts[k] + 1), -k)
            for k, (_, length, inside) in enumerate(gaps)
            if counts[k] < len(inside)
        ]
        counts[-max(wide)[1]] += 1
    chosen: set[str] = set()
    for (start, length, inside), count in zip(gaps, counts, strict=True):
        targets = [start + length * (k + 1) / (count + 1) for k in range(count)]
        chosen |= _nearest(arc, inside, targets)
    return chosen


def _nearest(arc: Mapping[str, float], inside: list[str], targets: list[float]) -> set[str]:
    """Give each target, in order, the nearest candidate that leaves one for each other."""
    chosen: set[str] = set()
    first = 0
    for k, target in enumerate(targets):
        stop = len(inside) - (len(targets) - k - 1)
        best = min(range(first, stop), key=lambda n: (abs(arc[inside[n]] - target), n))
        chosen.add(inside[best])
        first = best + 1
    return chosen
