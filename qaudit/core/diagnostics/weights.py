"""What weights look like to a quantizer: tails, ranges, and how far they lie from a grid.

Excess kurtosis and the share of outliers say how heavy the tails are, the effective range how
many standard deviations the grid of one quantization group has to span, and the distance to the
grid how far rounding moves a weight, in steps of that grid: the square root of 1/12 where
weights know nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.diagnostic import Diagnostic


@dataclass(frozen=True, kw_only=True)
class Weights(Diagnostic):
    """Kurtosis, outliers, ranges and distance to the grid, by tensor, role and model."""

    name: ClassVar[str] = "weights"

    group: int = 128
    sym: bool = False
    outlier: float = 6.0  # standard deviations
