"""The series of one target."""

from __future__ import annotations

from pathlib import Path

from qaudit.checkpoints.folder import find_all as find_folders
from qaudit.hub.listing import Listing
from qaudit.hub.series import find_all
from qaudit.types import Checkpoint, Recipe


def find_series(
    listing: Listing, target: str, recipe: Recipe | None = None
) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of one target in the order in which they were trained."""
    return find_all([target], recipe, lambda: listing)


def find_checkpoints(
    target: str | Path, recipe: Recipe | None = None, *, hashed: bool = True
) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of one folder in the order in which they were trained."""
    return find_folders([str(target)], recipe, hashed=hashed)
