"""Quantities of whole models that other diagnostics measured, to set beside an error."""

from __future__ import annotations

import math

from qaudit.types import Diagnostics


def traits_of(diagnostics: Diagnostics) -> dict[str, dict[str, float]]:
    """Return the quantities: name -> subject -> value."""
    quantities = {
        "kurtosis": {
            row.subject: row.kurtosis
            for row in diagnostics.weights
            if row.part == "model" and row.kurtosis is not None
        },
        "curvature": {
            row.subject: row.trace.estimate
            for row in diagnostics.curvature
            if row.part == "model" and math.isfinite(row.trace.estimate)
        },
    }
    return {name: values for name, values in quantities.items() if values}
