"""The checkpoint before a subject, in the order of its series. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qaudit.types import Checkpoint, Subject


def previous_of(subject: Subject, subjects: Sequence[Subject]) -> Checkpoint | None:
    """Return the checkpoint before: of the same branch, or of the trunk that the branch left.

    A soup has none. Only checkpoints of the audit count, in the order of the series; one with the
    same weights, as `main` often has, is no step of training.
    """
    if subject.merge is not None:
        return None
    own, before = subject.first, list[Checkpoint]()
    for candidate in subjects:
        if candidate.label == subject.label:
            break
        if candidate.merge is None and _series(candidate.first) == _series(own):
            before.append(candidate.first)
    branch = [c for c in before if (c.stage, c.ingredient) == (own.stage, own.ingredient)]
    trunk = [c for c in before if c.ingredient is None]
    earlier = (c for c in reversed(branch or trunk) if not c.files or c.files != own.files)
    return next(earlier, None)


def _series(checkpoint: Checkpoint) -> str:
    location = checkpoint.ref.location
    return location if checkpoint.commit else str(Path(location).parent)
