"""What further draws of calibration text cost, before any is made. No torch.

A draw is one more pass of every subject, in which only what calibrates is measured; the floor
is one pass of the last checkpoint, with full precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qaudit.core.scheme import Calibration, Scheme
from qaudit.planning.price import Load, Sizes, flops
from qaudit.types import Protocol, Subject


@dataclass(frozen=True)
class Again:
    """The price of everything that is measured once more."""

    flops: float = 0.0
    nbytes_read: int = 0
    streams: int = 0
    notes: tuple[str, ...] = ()


def calibrated(schemes: Sequence[Scheme]) -> tuple[Scheme, ...]:
    """Return the schemes that another draw of calibration text makes another model with."""
    return tuple(s for s in schemes if s.calibration is not Calibration.NONE)


def last_checkpoint(subjects: Sequence[Subject]) -> int | None:
    """Return the position of the subject whose numerical floor is measured."""
    return max((k for k, s in enumerate(subjects) if s.kind == "checkpoint"), default=None)


def price_repeats(
    subjects: Sequence[Subject],
    schemes: Sequence[Scheme],
    protocol: Protocol,
    sizes: Sizes,
    repeats: int,
    *,
    returning: bool,
) -> Again:
    """Return the price of the draws after the first, and of the floor."""
    drawn = calibrated(schemes)
    if repeats == 1:
        return Again()
    if not drawn:
        return Again(notes=("no scheme here calibrates: there is nothing to draw again",))
    load = Load.of(protocol, drawn)
    whole = flops(sizes, load, returning=returning)
    alone = flops(sizes, replace(load, full_precision=False), returning=returning)
    weights = [sum(c.nbytes for c, _ in subject.members) for subject in subjects]
    last = last_checkpoint(subjects)
    return Again(
        flops=(repeats - 1) * len(subjects) * alone + (whole if last is not None else 0.0),
        nbytes_read=(repeats - 1) * sum(weights) + (weights[last] if last is not None else 0),
        streams=(repeats - 1) * len(subjects) * len(drawn)
        + (1 + len(drawn) if last is not None else 0),
    )
