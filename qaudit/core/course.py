"""Which checkpoints make up one run, and their places in it.

Of ingredients that were trained side by side from one state, the longest represents all: their ends
are repetitions of each other, and no course. What does
not come after the checkpoint before it begins another run: a fork that goes back, a schedule
trained anew, another repository. A name that tells no place, as `main`, is in none of them where
others tell theirs.

**Doubts** about a checkpoint before anything is compared, as sentences that can be parsed again.

The rooms that find checkpoints write these sentences into `Checkpoint.suspect` and `.notes`; the
judge, which compares hashes, has to know which revisions a sentence names. The sentence is
the one form of it: people read it, a lock keeps it as text, and it is written and
read in this one place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qaudit.types import Checkpoint, Subject

RELEASES = ("main", "master")
Unit = Literal["tokens", "steps", "checkpoints in order"]


@dataclass(frozen=True)
class Places:
    """The place of every checkpoint, in a unit."""

    unit: Unit
    positions: tuple[float, ...]


def on_trunk(checkpoints: Sequence[Checkpoint]) -> list[bool]:
    """Return for each checkpoint whether it is on the main line.

    Of the parallel ingredients of a stage that is the one with the most checkpoints that are not
    suspect; of equals the one that goes furthest, of these the first.
    """
    ingredients: dict[str | None, dict[int, list[int]]] = {}
    for c in checkpoints:
        if c.ingredient is not None:
            reached = ingredients.setdefault(c.stage, {}).setdefault(c.ingredient, [])
            reached += [] if c.suspect else [c.step or c.tokens or 0]
    longest = {
        stage: -max((len(reached), max(reached, default=-1), -k) for k, reached in of.items())[-1]
        for stage, of in ingredients.items()
    }
    return [c.ingredient is None or c.ingredient == longest[c.stage] for c in checkpoints]


def ends(checkpoints: Sequence[Checkpoint]) -> list[int]:
    """Return where the series ends: at its last checkpoint, and those of the ingredients beside."""
    if not checkpoints:
        return []
    last = checkpoints[-1]
    if last.ingredient is None:
        return [len(checkpoints) - 1]
    beside = {c.ingredient: k for k, c in enumerate(checkpoints) if c.stage == last.stage}
    return sorted(beside.values())


def is_release(checkpoint: Checkpoint) -> bool:
    """Return whether a repository serves a checkpoint by default."""
    return (checkpoint.ref.revision or checkpoint.label) in RELEASES


def place(checkpoints: Sequence[Checkpoint]) -> Places:
    """Place checkpoints by tokens where all know theirs, else by step, else by their order.

    A stage whose steps count from zero again follows the one before.
    """
    tokens = [c.tokens for c in checkpoints if c.tokens is not None]
    steps = [c.step for c in checkpoints if c.step is not None]
    if len(tokens) == len(checkpoints) and len(set(tokens)) > 1:
        return Places("tokens", tuple(map(float, tokens)))
    if len(steps) < len(checkpoints) or len(set(steps)) < 2:
        numbers = range(1, len(checkpoints) + 1)
        return Places("checkpoints in order", tuple(map(float, numbers)))
    offsets: dict[str | None, int] = {}
    placed: list[float] = []
    for checkpoint, step in zip(checkpoints, steps, strict=True):
        if checkpoint.stage not in offsets:
            reached = int(max(placed, default=0))
            offsets[checkpoint.stage] = reached if step <= reached else 0
        placed.append(float(offsets[checkpoint.stage] + step))
    return Places("steps", tuple(placed))


def courses(checkpoints: Sequence[Checkpoint]) -> list[tuple[list[Checkpoint], Places]]:
    """Return the runs of a series in their order, each with its places."""
    numbered = [c for c in checkpoints if c.step is not None or c.tokens is not None]
    candidates = numbered if len(numbered) > 1 else list(checkpoints)
    main = [c for c, on in zip(candidates, on_trunk(candidates), strict=True) if on]
    placed = place(main)
    runs: list[list[Checkpoint]] = []
    before = 0.0
    for checkpoint, position in zip(main, placed.positions, strict=True):
        same = bool(runs) and runs[-1][-1].family == checkpoint.family
        if same and position > before:
            runs[-1].append(checkpoint)
        else:
            runs.append([checkpoint])
        before = position
    return [(run, place(run)) for run in runs]


def previous_of(subject: Subject, subjects: Sequence[Subject]) -> Checkpoint | None:
    """Return the checkpoint before: of the same branch, or of the trunk that the branch left.

    A soup has none. Only checkpoints of the audit count, in the order of the series; one with the
    same weights, as `main` often has, is no step of training.
    """
    if subject.merge is not None:
        return None
    last, before = subject.first, list[Checkpoint]()
    for candidate in subjects:
        if candidate.label == subject.label:
            break
        if candidate.merge is None and _series(candidate.first) == _series(last):
            before.append(candidate.first)
    branch = [c for c in before if (c.stage, c.ingredient) == (last.stage, last.ingredient)]
    trunk = [c for c in before if c.ingredient is None]
    earlier = (c for c in reversed(branch or trunk) if not c.files or c.files != last.files)
    return next(earlier, None)


def _series(checkpoint: Checkpoint) -> str:
    location = checkpoint.ref.location
    return location if checkpoint.commit else str(Path(location).parent)


NO_WEIGHTS = "it holds no weights"

_REPORT = "its family's file says"
_EQUAL, _ONE = "are said to be equal", "are said to be one checkpoint"
_NAMES = re.compile(rf"((?:`[^`]+`(?:, | and )?){{2,}}) (?:{_EQUAL}|{_ONE})(?::| [(]|$)")


def bad_report(reason: str, source: str | None = None, *, some: bool = False) -> str:
    """Return the sentence that a family's file has against a revision, or some of several."""
    which = ", of some revisions like it" if some else ""
    return f"{_REPORT}{which}: {reason}{_from(source)}"


def is_bad_report(text: str) -> bool:
    """Whether a sentence is one of a family's file against a revision."""
    return text.startswith(_REPORT)


def equal_report(
    names: Sequence[str], reason: str | None, source: str | None = None, *, one_place: bool = False
) -> str:
    """Say that revisions serve the same weights; those of one place in a run may well do so."""
    claim = f"{listed(names)} {_ONE if one_place else _EQUAL}"
    return f"{claim}: {reason}{_from(source)}" if reason else f"{claim}{_from(source)}"


def names_in_equal_report(text: str) -> tuple[str, ...]:
    """Return the revisions that a sentence calls the same, or none if it is another sentence."""
    match = _NAMES.match(text)
    return tuple(re.findall("`([^`]+)`", match[1])) if match else ()


def doubts_of_files(suspect: Sequence[str]) -> tuple[str, ...]:
    """Return the doubts that come from the files themselves and not from a family's file."""
    return tuple(t for t in suspect if not is_bad_report(t) and not names_in_equal_report(t))


def listed(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}" if len(quoted) > 1 else quoted[0]


def _from(source: str | None) -> str:
    return f" ({source})" if source else ""
