"""An audit as one flat table of values, to compare with a tolerance."""

from __future__ import annotations

import math
from typing import Any

OF_THE_RUN = ("seconds", "details", "path", "evidence", "evidence_sha256")


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return values by their path, without what differs from run to run."""
    if isinstance(value, dict):
        kept = {str(k): v for k, v in value.items() if k not in OF_THE_RUN}
    elif isinstance(value, list):
        kept = {str(k): v for k, v in enumerate(value)}
    else:
        return {name: value}
    return {path: v for k, below in kept.items() for path, v in flat(below, f"{name}/{k}").items()}


def must_be_close(value: Any, expected: Any, tolerance: float) -> None:
    """Assert that floats are close and everything else is equal."""
    values, others = flat(value), flat(expected)
    assert values.keys() == others.keys()
    for name, other in others.items():
        if isinstance(other, float):
            assert math.isclose(values[name], other, rel_tol=tolerance, abs_tol=tolerance), name
        else:
            assert values[name] == other, name
