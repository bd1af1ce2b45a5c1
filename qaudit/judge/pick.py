"""The one thing to ship: the lowest quantized loss at the scheme that will be shipped.

The winner of many looks better than it is, because it was chosen on the documents it is
measured on. `confirmed_on` is None until other documents say the same, and every text made of
a pick must say so.
"""

from __future__ import annotations

from qaudit.core import statistics
from qaudit.judge.table import Table, is_finite
from qaudit.types import Measurement, Pick

PREFERRED = "gptq-4bit"


def choose(table: Table) -> Pick | None:
    """Pick the subject with the lowest quantized loss, with the interval to the runner-up."""
    scheme = picked_scheme(table)
    ranked = ranking(table, scheme) if scheme else []
    if scheme is None or not ranked:
        return None
    interval = None
    if len(ranked) > 1:
        best, second = (m.evidence for m in ranked[:2])
        used = best.tokens > 0
        interval = statistics.outright(
            best.nll_sum[used], second.nll_sum[used], best.tokens[used], table.confidence
        )
    return Pick(
        subject=ranked[0].subject,
        scheme=scheme,
        objective=f"lowest quantized loss at {scheme}",
        runner_up=ranked[1].subject if len(ranked) > 1 else None,
        interval=interval,
        confirmed_on=None,
    )


def picked_scheme(table: Table) -> str | None:
    """Return the scheme to pick at: the preferred one, or the first quantized one measured."""
    schemes = table.quantized_schemes
    if PREFERRED in schemes:
        return PREFERRED
    return schemes[0] if schemes else None


def ranking(table: Table, scheme: str) -> list[Measurement]:
    """Return the finite measurements under a scheme, the lowest loss first."""
    found = (table.find(s.label, scheme) for s in table.subjects)
    finite = [m for m in found if m is not None and is_finite(m)]
    return sorted(finite, key=lambda m: float(m.evidence.nll_sum.sum()))
