"""Price of `weights`: nothing, because it reads the weights while the schemes quantize them."""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.core.scheme import Scheme
from qaudit.diagnostics.weights.parameters import WeightStatistics
from qaudit.planning.diagnoses import DiagnosticPrice
from qaudit.planning.price import Sizes
from qaudit.types import Protocol


def price(
    parameters: WeightStatistics, schemes: Sequence[Scheme], protocol: Protocol, sizes: Sizes
) -> DiagnosticPrice:
    """Return no work and no stream."""
    return DiagnosticPrice("weights: read while schemes quantize them; no stream of their own")
