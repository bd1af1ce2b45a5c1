"""Where the learning rate of a run starts to fall, as far as its checkpoints tell."""

from __future__ import annotations

import math

from qaudit.diagnostics.phases.judge.pairs import Run
from qaudit.types import Span


def decay_of(run: Run) -> tuple[Span | None, str]:
    """Return the stretch in which the rate leaves its peak for good, or why there is none.

    The start is between the last checkpoint at the peak and the one after it.
    """
    rates = [c.learning_rate for c in run.checkpoints]
    if any(rate is None for rate in rates):
        return None, "the learning rate is not known at every checkpoint"
    known = [rate or 0.0 for rate in rates]
    peak = max(known)
    held = [k for k, rate in enumerate(known) if math.isclose(rate, peak, rel_tol=1e-6)]
    if held[-1] == len(known) - 1:
        return None, "the learning rate does not fall before the last checkpoint"
    if held == [0]:
        return None, "the learning rate falls from the first checkpoint on, or before it"
    low, high = held[-1], held[-1] + 1
    x = run.places.positions
    return Span(x[low], x[high], run.labels[low], run.labels[high]), ""
