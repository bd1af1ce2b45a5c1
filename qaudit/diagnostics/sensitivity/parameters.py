"""Parameters of `sensitivity`, and the scheme that they choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import Diagnostic, DiagnosticWork
from qaudit.errors import UsageError
from qaudit.settings import EXAMPLE_SCHEME

MOST_BITS = 8
ROLES = 7  # in a block, as far as a plan knows


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Diagnostic):
    """The error of each role and group of layers alone, and a mixture of bits from it."""

    name: ClassVar[str] = "sensitivity"

    scheme: str = "auto"  # the first of the recipe with 3 bits, or else with any
    budget: float = 0.0  # bits per weight; 0: halfway between all low and all high
    layers: int = 4  # groups of blocks

    def schemes(self, schemes: Sequence[Scheme]) -> Sequence[Scheme]:
        return [self.scheme_among(schemes)]

    def work(self, schemes: Sequence[Scheme], blocks: int) -> DiagnosticWork:
        scheme = self.scheme_among(schemes)
        # About each role twice, the groups, all of it twice, and a mixture.
        count = 2 * ROLES + min(self.layers, blocks) + 2 + 1
        return DiagnosticWork(
            f"sensitivity at {scheme.short}: about {count} streams more for each subject, "
            "and two more quantizations of each block",
            streams=count,
            passes=1,
            schemes=(scheme, scheme),
        )

    def scheme_among(self, schemes: Sequence[Scheme]) -> Scheme:
        """Return the scheme that parts are quantized with: one with a choice of bits."""
        if self.scheme != "auto":
            named = parse_scheme(self.scheme)
            if not hasattr(named, "bits"):
                raise UsageError(
                    f"`{named.short}` has no bits to choose, and sensitivity chooses bits",
                    hint=f"name another, as `--diagnose sensitivity:scheme={EXAMPLE_SCHEME}`",
                )
            return named
        some = [scheme for scheme in schemes if hasattr(scheme, "bits")]
        if not some:
            raise UsageError(
                "no scheme of this audit has bits to choose, and sensitivity chooses bits",
                hint=f"name one, as `--diagnose sensitivity:scheme={EXAMPLE_SCHEME}`",
            )
        return next((scheme for scheme in some if bits_of(scheme) == 3), some[0])


def bits_of(scheme: Scheme) -> int:
    return int(scheme.bits)  # type: ignore[attr-defined]


def low_and_high(scheme: Scheme) -> tuple[int, int]:
    """Return the two numbers of bits that a mixture is made of."""
    low = min(bits_of(scheme), MOST_BITS - 1)
    return low, low + 1
