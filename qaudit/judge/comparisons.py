"""Two subjects under one scheme, paired on the same documents; negative favours `a`.

Three questions that can have different answers: which quantized model is better as it is
(`outright`, which decides what to ship), which loses less to quantization in nats
(`difference_of_differences`), and which loses a smaller part of its own loss
(`relative_error_difference`, the reading of the papers). Where calibration was drawn several
times, intervals are over all draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from qaudit.core import statistics
from qaudit.core.statistics import Statistic
from qaudit.judge.pooling import estimated
from qaudit.judge.table import Table
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
    found = estimated(table, [(a, scheme), (b, scheme)], statistics.change)
    if found is None:
        return
    yield "outright", found.interval
    if scheme == FULL_PRECISION:
        return
    four = [(label, which) for label in (a, b) for which in (scheme, FULL_PRECISION)]
    kinds: tuple[tuple[Kind, Statistic], ...] = (
        ("difference_of_differences", statistics.change_difference),
        ("relative_error_difference", statistics.excess_difference),
    )
    for kind, statistic in kinds:
        found = estimated(table, four, statistic)
        if found is not None:
            yield kind, found.interval


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
