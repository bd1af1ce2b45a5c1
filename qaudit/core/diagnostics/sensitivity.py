"""Which part of a model a scheme's error comes from, and which bits each part is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.diagnostic import Diagnostic


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Diagnostic):
    """The error of each role and group of layers alone, and a mixture of bits from it."""

    name: ClassVar[str] = "sensitivity"

    scheme: str = "auto"  # the first of the recipe with 3 bits, or else with any
    budget: float = 0.0  # bits per weight; 0: halfway between all low and all high
    layers: int = 4  # groups of blocks
