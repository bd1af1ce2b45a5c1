"""Price of `plane`: one pass, or with `grid` a pass for every step to the checkpoint before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qaudit.core.scheme import Scheme
from qaudit.diagnostics.plane.parameters import Plane
from qaudit.planning.diagnoses import DiagnosticPrice
from qaudit.planning.price import Load, Sizes, flops
from qaudit.types import Price, Protocol


def price(
    parameters: Plane, schemes: Sequence[Scheme], protocol: Protocol, sizes: Sizes
) -> DiagnosticPrice:
    """Return the price of one subject; a grid may turn out to be a line and cost less."""
    scheme, along = parameters.scheme_among(schemes), len(parameters.along)
    documents = min(parameters.documents, protocol.evaluation_documents)
    load = Load.of(replace(protocol, evaluation_documents=documents), [scheme])
    load = replace(load, schemes=along - 1)
    passes = along if parameters.grid else 1
    across = f"{along} passes of them, towards the checkpoint before"
    return DiagnosticPrice(
        f"plane at {scheme.short}: {along} streams more for each subject, in float32; "
        + (across if parameters.grid else "one pass"),
        Price(passes * flops(sizes, load), streams=passes * load.schemes),
        load,
    )
