"""The loss on a slice through a checkpoint: which points are looked at.

A point is theta + a * v + b * u: v leads from the checkpoint to the one before it, u to what a
scheme makes of it, so that (0, 0), (1, 0) and (0, 1) are the three models themselves. Neither
direction is scaled: a slice says what these moves cost, not how wide a valley is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.diagnostic import Diagnostic
from qaudit.errors import SchemeError


@dataclass(frozen=True, kw_only=True)
class Plane(Diagnostic):
    """The loss from a checkpoint to its quantized self and beyond, and to the one before it."""

    name: ClassVar[str] = "plane"

    grid: bool = False  # towards the checkpoint before, too
    steps: int = 4  # from one of the models to the next
    beyond: int = 2  # steps on either side of them
    documents: int = 64
    scheme: str = "auto"  # the first of the recipe with 3 bits, or else the first

    def __post_init__(self) -> None:
        """Refuse numbers that leave nothing to look at."""
        for field, lowest in {"steps": 1, "beyond": 0, "documents": 2}.items():
            if getattr(self, field) < lowest:
                raise SchemeError(
                    f"`{field}={getattr(self, field)}` of `{self.name}` is out of range",
                    hint=f"use {lowest} or more",
                )

    @property
    def along(self) -> tuple[float, ...]:
        """Return where points lie along a direction; 0 and 1 are among them."""
        return tuple(k / self.steps for k in range(-self.beyond, self.steps + self.beyond + 1))
