"""DiagnosticPrice of `sensitivity`: a pass over the parts, and one over the mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qaudit.core.scheme import Scheme
from qaudit.diagnostics.sensitivity.parameters import Sensitivity
from qaudit.planning.diagnoses import DiagnosticPrice
from qaudit.planning.price import Load, Sizes, flops
from qaudit.types import Protocol

ROLES = 7
"""The number of roles in a block, as far as a plan knows."""


def price(
    parameters: Sensitivity, schemes: Sequence[Scheme], protocol: Protocol, sizes: Sizes
) -> DiagnosticPrice:
    """Return the price of one subject; the pass over the mixture needs less memory."""
    scheme, count = parameters.scheme_among(schemes), streams_of(parameters, sizes)
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
        flops(sizes, parts) + flops(sizes, replace(parts, schemes=1)),
        count,
        parts,
    )


def streams_of(parameters: Sensitivity, sizes: Sizes) -> int:
    """Return about how many models are evaluated: each role twice, groups, all twice, a mixture."""
    return 2 * ROLES + min(parameters.layers, sizes.blocks) + 2 + 1
