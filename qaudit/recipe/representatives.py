"""Select a few checkpoints that represent a whole series, where none are named.

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

from collections.abc import Iterable, Mapping, Sequence

from qaudit.core.course import is_release, on_trunk
from qaudit.types import Checkpoint

MOST_MEASURED = 16
"""A series of at most so many checkpoints is measured whole where none are named."""

REPRESENTATIVES = 12
"""The number that is measured of a longer one, besides the ends of its ingredients."""


def representatives(checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    distinct = _distinct(checkpoints)
    placed = _placed(distinct)
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


def _distinct(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    names: dict[object, Checkpoint] = {}
    for c in checkpoints:
        key = (c.ref.location, c.commit, c.ref.subfolder) if c.commit else c.label
        if key not in names or (is_release(names[key]) and not is_release(c)):
            names[key] = c
    labels = {c.label for c in names.values()}
    return [c for c in checkpoints if c.label in labels]


def _placed(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Leave out what has no place in the run, and second names of a place."""
    with_progress = [c for c in checkpoints if c.step is not None or c.tokens is not None]
    names: dict[object, Checkpoint] = {}
    for c in sorted(with_progress or checkpoints, key=is_release):
        point = (c.stage, c.ingredient, c.tokens if c.step is None else None, c.step)
        names.setdefault(point if with_progress else c.label, c)
    labels = {c.label for c in names.values()}
    return [c for c in checkpoints if c.label in labels]


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
