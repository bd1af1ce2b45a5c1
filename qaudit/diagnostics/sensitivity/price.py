"""Price of `sensitivity`: a pass over the parts, and one over the mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qaudit.core.scheme import Scheme
from qaudit.diagnostics.sensitivity.parameters import Sensitivity
from qaudit.planning.diagnoses import DiagnosticPrice
from qaudit.planning.price import Load, Sizes, flops
from qaudit.types import Price, Protocol

ROLES = 7
"""The number of roles in a block, as far as a plan knows."""


def price(
    parameters: Sensitivity, schemes: Sequence[Scheme], protocol: Protocol, sizes: Sizes
) -> DiagnosticPrice:
    """Return the price of one subject; the pass over the mixture needs less memory."""
    scheme = parameters.scheme_among(schemes)
    # About each role twice, the groups, all of it twice, and a mixture.
    count = 2 * ROLES + min(parameters.layers, sizes.blocks) + 2 + 1
    parts = replace(
        Load.of(protocol, [scheme]),
        own_streams=0,
        shared_calibration=True,
        schemes=count - 1,
        full_precision=False,
    )
    return DiagnosticPrice(
        f"sensitivity at {scheme.short}: about {count} streams more for each subject, "
        "and two more quantizations of each block",
        Price(flops(sizes, parts) + flops(sizes, replace(parts, schemes=1)), streams=count),
        parts,
    )
