"""Which checkpoints of a series are measured, by name or glob."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from qaudit.core.keys import nearest
from qaudit.errors import UsageError
from qaudit.types import Checkpoint, Recipe


def select(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that the recipe's globs name, or all if it names none."""
    if not recipe.checkpoints:
        return tuple(checkpoints)
    wanted = {c.label for glob in recipe.checkpoints for c in matching(glob, checkpoints)}
    return tuple(c for c in checkpoints if c.label in wanted)


def matching(glob: str, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoint of this name, or all that match it as a glob."""
    known = {c.label: c for c in checkpoints}
    if glob in known:
        return [known[glob]]
    found = [c for label, c in known.items() if fnmatchcase(label, glob)]
    if found:
        return found
    if any(sign in glob for sign in "*?["):
        raise UsageError(f"no checkpoint matches `{glob}`", hint=f"there are: {', '.join(known)}")
    raise UsageError(f"there is no checkpoint `{glob}`", hint=nearest(glob, known))
