"""Two subjects under one scheme, paired on the same documents; negative favours `a`.

Three questions that can have different answers: which quantized model is better as it is
(`outright`, which decides what to ship), which loses less to quantization in nats
(`difference_of_differences`), and which loses a smaller part of its own loss
(`relative_error_difference`, the reading of the papers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from qaudit.core import statistics
from qaudit.judge.table import Table, is_finite
from qaudit.types import FULL_PRECISION, Comparison, Interval

Kind = Literal["outright", "difference_of_differences", "relative_error_difference"]
Verdict = Literal["a_better", "b_better", "equivalent", "inconclusive"]
UNITS: dict[Kind, str] = {
    "outright": "nats per token",
    "difference_of_differences": "nats per token",
    "relative_error_difference": "fraction",
}


def compare(table: Table, equivalence: Mapping[str, float]) -> tuple[Comparison, ...]:
    """Compare every pair worth comparing under every scheme that both were measured with."""
    return tuple(
        Comparison(kind, UNITS[kind], scheme, a, b, found, verdict)
        for a, b in _pairs(table)
        for scheme in (FULL_PRECISION, *table.quantized_schemes)
        for kind, found in _intervals(table, scheme, a, b)
        for verdict in [judge_difference(found, table.documents, equivalence.get(kind, 0.0))]
    )


def _pairs(table: Table) -> Iterator[tuple[str, str]]:
    """Yield soups with members and the last checkpoint, and that with the ends of stages."""
    last = table.last_checkpoint
    for subject in table.subjects:
        if subject.kind == "soup":
            others = dict.fromkeys([*table.members(subject), *([last] if last else [])])
            yield from ((subject.label, other) for other in others)
    if last:
        yield from ((last, end) for end in table.stage_ends())


def _intervals(table: Table, scheme: str, a: str, b: str) -> Iterator[tuple[Kind, Interval]]:
    found = table.find(a, scheme), table.find(b, scheme)
    if found[0] is None or found[1] is None or not all(is_finite(m) for m in found if m):
        return
    used = found[0].evidence.tokens > 0
    tokens = found[0].evidence.tokens[used]
    nll_a, nll_b = (m.evidence.nll_sum[used] for m in found if m)
    yield "outright", statistics.outright(nll_a, nll_b, tokens, table.confidence)
    full = table.full(a), table.full(b)
    if scheme == FULL_PRECISION or full[0] is None or full[1] is None:
        return
    full_a, full_b = (m.evidence.nll_sum[used] for m in full if m)
    pair_a, pair_b = (nll_a, full_a), (nll_b, full_b)
    yield (
        "difference_of_differences",
        statistics.difference_of_differences(pair_a, pair_b, tokens, table.confidence),
    )
    yield (
        "relative_error_difference",
        statistics.relative_error_difference(pair_a, pair_b, table.confidence),
    )


def judge_difference(found: Interval, documents: int, margin: float = 0.0) -> Verdict:
    """Compare an interval with zero, or with a margin inside which differences do not matter."""
    if documents < statistics.MINIMUM_DOCUMENTS:
        return "inconclusive"
    if -margin <= found.low and found.high <= margin:
        return "equivalent"
    if found.high < 0:
        return "a_better"
    if found.low > 0:
        return "b_better"
    return "inconclusive"
