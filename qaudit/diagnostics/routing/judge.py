"""How often each layer's router chooses other experts than in full precision, and by how much.

Stream and full precision are compared token by token; the unit stays the document. All intervals
of one subject under one scheme hold at once (Bonferroni over its layers).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qaudit.core import statistics
from qaudit.core.statistics import Array
from qaudit.judge.fidelity import MEANS, agreement_of
from qaudit.judge.table import Cell, Measurements
from qaudit.types import Diagnostics, Finding, Interval, RoutingRow


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    rows = tuple(row for cell in table.cells for row in _rows(table, cell))
    return replace(diagnostics, routing=rows), ()


def _rows(table: Measurements, cell: Cell) -> list[RoutingRow]:
    measured = table.draws(*cell)[0]
    routing = measured.evidence.routing
    if routing is None:
        return []
    tokens = measured.evidence.tokens
    scored = tokens > 0
    count = tokens[scored].astype(np.float64)
    level = statistics.simultaneous(table.confidence, len(routing.blocks))

    def per_token(sums: Array) -> Interval:
        return statistics.interval((sums, count), statistics.per_token, level)

    return [
        RoutingRow(
            subject=cell[0],
            scheme=cell[1],
            spec=measured.spec,
            block=int(block),
            documents=int(scored.sum()),
            tokens=int(tokens.sum()),
            agreement=agreement_of(per_token(count - routing.same[layer, scored])),
            moved=MEANS["routing_moved"].bounded(per_token(routing.moved[layer, scored])),
        )
        for layer, block in enumerate(routing.blocks)
    ]
